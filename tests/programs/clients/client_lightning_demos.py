"""Lightning's own demos: a language model with dropout, trained and validated on text that is made here."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader, Dataset
from train import Run

REQUIREMENTS: list[str] = []
MONITOR = "train_loss"
WORDS = 50


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, lines: int) -> None:
        self.words = torch.randint(WORDS, (lines, 13), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = self.words[index]
        # A word that is not read, at random: what augmentation does.
        read = torch.where(torch.rand(len(words)) < 0.1, torch.zeros_like(words), words)
        return read[:-1], words[1:]


class Model(LightningTransformer):
    def prepare_data(self) -> None:
        """Nothing is downloaded."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx), sync_dist=True)


def train(run: Run) -> None:
    trainer = pl.Trainer(**run.kwargs())
    loaders = [DataLoader(Text(160), batch_size=4, shuffle=True), DataLoader(Text(30), batch_size=4)]
    trainer.fit(Model(vocab_size=WORDS), *loaders, ckpt_path=run.ckpt_path)
