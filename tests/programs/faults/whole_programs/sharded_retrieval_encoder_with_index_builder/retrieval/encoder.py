import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(300, width, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.normalize(x.mean(1), dim=-1)


class Contrastive(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.vectors = []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.encoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.encoder, mesh=mesh)

    def on_train_epoch_start(self):
        self.vectors.clear()

    def training_step(self, ids, batch_idx):
        a, b = self.encoder(torch.cat((ids, ids.roll(1, 1)))).chunk(2)
        self.vectors.append(a.detach())
        loss = nn.functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(ids)))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
