"""Instruction tuning with low-rank adapters, small enough for a workstation without a GPU."""

from dataclasses import asdict, dataclass

import lightning as L
import torch
from evaluation import Harness
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


@dataclass
class Settings:
    vocabulary: int = 256
    context: int = 320
    width: int = 128
    layers: int = 4
    rank: int = 8
    lr: float = 1e-3
    batch_size: int = 8
    epochs: int = 3


class Adapted(nn.Module):
    """A frozen linear layer with a trainable update of low rank."""

    def __init__(self, inner: nn.Linear, rank: int):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self, width: int, rank: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        self.qkv = Adapted(nn.Linear(width, 3 * width), rank)
        self.out = Adapted(nn.Linear(width, width), rank)
        self.mlp = nn.Sequential(
            Adapted(nn.Linear(width, 4 * width), rank), nn.GELU(), Adapted(nn.Linear(4 * width, width), rank)
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norms[1](x))


class InstructionModel(L.LightningModule):
    def __init__(self, settings: Settings):
        super().__init__()
        self.save_hyperparameters(asdict(settings))
        self.lr, self.vocabulary, self.context = settings.lr, settings.vocabulary, settings.context
        self.embedding = nn.Embedding(settings.vocabulary, settings.width).requires_grad_(False)
        self.layers = nn.Sequential(*[Layer(settings.width, settings.rank) for _ in range(settings.layers)])
        self.head = Adapted(nn.Linear(settings.width, settings.vocabulary), settings.rank)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))

    def _loss(self, batch):
        (tokens,) = batch
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def instructions(count: int, length: int = 48, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    first = torch.randint(256, (count, 1), generator=g)
    return TensorDataset((first + torch.randint(1, 4, (count, 1), generator=g) * torch.arange(length)) % 256)


def main():
    settings = Settings()
    L.seed_everything(42)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=settings.epochs,
        callbacks=[Harness(), ModelCheckpoint(monitor="val_loss", save_last=True), LearningRateMonitor()],
        log_every_n_steps=10,
    )
    trainer.fit(
        InstructionModel(settings),
        DataLoader(instructions(960), settings.batch_size, shuffle=True),
        DataLoader(instructions(120, seed=1), settings.batch_size),
    )


if __name__ == "__main__":
    main()
