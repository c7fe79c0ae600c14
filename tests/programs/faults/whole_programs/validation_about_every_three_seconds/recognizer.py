"""A convolutional encoder for short commands, from log-mel frames to one of 35 words."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

WORDS, MELS, FRAMES = 35, 40, 32


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, 9, padding=4, groups=width)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.norm(self.pointwise(self.depthwise(x))))


class CommandRecognizer(L.LightningModule):
    def __init__(self, width: int = 64, blocks: int = 4, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv1d(MELS, width, 5, padding=2)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)
        self.accuracy = MulticlassAccuracy(WORDS)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        for part in (self.stem, self.head):
            fully_shard(part, mesh=mesh)

    def forward(self, features: Tensor) -> Tensor:
        x = self.stem(features)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, words = batch
        loss = F.cross_entropy(self(features), words, label_smoothing=0.1)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        features, words = batch
        logits = self(features)
        self.accuracy.update(logits, words)
        self.log("val/loss", F.cross_entropy(logits, words), sync_dist=True, prog_bar=True)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Commands(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, samples: int = 16000) -> None:
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(1)
        templates = torch.randn(WORDS, MELS, 1, generator=generator)

        def make(n: int) -> TensorDataset:
            words = torch.randint(WORDS, (n,), generator=generator)
            return TensorDataset(templates[words] + torch.randn(n, MELS, FRAMES, generator=generator), words)

        self.train_set, self.val_set = make(self.samples), make(320)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, self.batch_size)
