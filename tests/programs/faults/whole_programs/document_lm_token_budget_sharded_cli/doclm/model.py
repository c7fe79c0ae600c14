import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shift = nn.Conv1d(width, width, 3)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.shift(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + self.mlp(h)


class DocumentLM(L.LightningModule):
    def __init__(self, width: int = 32, depth: int = 2, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Embedding(200, width), *(Mixer(width) for _ in range(depth)), nn.Linear(width, 200))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, Mixer):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["ids"][:, :-1])
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none")
        loss = (losses * batch["mask"]).sum() / batch["mask"].sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
