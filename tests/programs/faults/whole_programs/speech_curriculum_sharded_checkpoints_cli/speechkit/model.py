import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x.mean(1))


class SpeechClassifier(L.LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(width)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.encoder.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.encoder, mesh=mesh)

    def training_step(self, batch, batch_idx):
        losses = nn.functional.cross_entropy(self.encoder(batch["frames"]), batch["label"], reduction="none")
        self.log("loss", losses.mean(), prog_bar=True)
        return {"loss": losses.mean(), "per_utterance": losses.detach()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
