import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Regressor(L.LightningModule):
    def __init__(self, width=64, hidden=128, depth=3):
        super().__init__()
        self.save_hyperparameters()
        blocks = [nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(width, hidden), *blocks, nn.Linear(hidden, 1))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in list(self.net)[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(-1), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
