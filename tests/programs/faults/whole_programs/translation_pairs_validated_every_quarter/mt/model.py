import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Translator(nn.Module):
    def __init__(self, width, depth, length=12, vocabulary=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.1)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embed(ids) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TranslationTask(L.LightningModule):
    def __init__(self, width=48, depth=2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = Translator(width, depth)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def step(self, batch):
        source, target = batch
        return nn.functional.cross_entropy(self.net(source).transpose(1, 2), target)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step(batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
