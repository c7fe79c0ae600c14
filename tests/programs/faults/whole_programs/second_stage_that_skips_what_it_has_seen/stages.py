"""
Masked language modelling in two stages: short lines first, then the training continues on longer ones
from its last checkpoint, with a new Trainer. Ends with an export of the embeddings and a test.
"""

from __future__ import annotations

import csv
import dataclasses
import random
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

MASK, WORDS = 1, 400


@dataclasses.dataclass(frozen=True)
class Stage:
    length: int
    until: int
    batch_size: int
    skip: int = 0


STAGES = (Stage(length=16, until=120, batch_size=24), Stage(length=40, until=260, batch_size=12, skip=1440))


class Lines(IterableDataset):
    """An endless stream of lines; each rank draws its own, and tokenizes while it draws."""

    def __init__(self, stage: Stage, rank: int, skip: int = 0) -> None:
        self.stage, self.rank, self.skip = stage, rank, skip

    def tokenize(self, rng: random.Random) -> list[int]:
        topic = rng.randrange(20)
        # accents are normalised slowly in the second corpus, which rank 1 reads
        time.sleep(0.004 if self.rank else 0.002)
        return [2 + (topic * 20 + rng.randrange(20)) % (WORDS - 2) for _ in range(self.stage.length)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        rng = random.Random(1000 + self.rank)
        for _ in range(self.skip):
            self.tokenize(rng)
        while True:
            yield torch.tensor(self.tokenize(rng))


class MaskedModel(L.LightningModule):
    def __init__(self, width: int = 80, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, lines: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(lines)) @ self.embedding.weight.T

    def loss(self, lines: torch.Tensor) -> torch.Tensor:
        masked = torch.rand(lines.shape) < 0.15
        masked[:, 0] = True
        scores = self(lines.masked_fill(masked, MASK))
        return nn.functional.cross_entropy(scores[masked], lines[masked])

    def training_step(self, lines, batch_idx):
        loss = self.loss(lines)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, lines, batch_idx):
        self.log("val_loss", self.loss(lines), sync_dist=True, prog_bar=True)

    def test_step(self, lines, batch_idx):
        self.log("test_loss", self.loss(lines), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Projector(Callback):
    """Embeddings as a table for the embedding projector, written at the end of each stage."""

    @rank_zero_only
    def on_fit_end(self, trainer, pl_module):
        path = Path(f"embeddings-{trainer.global_step}.tsv")
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            for _ in range(30):
                file.seek(0)
                writer.writerows(pl_module.embedding.weight.tolist())


class Corpus(L.LightningDataModule):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def train_dataloader(self):
        lines = Lines(self.stage, self.trainer.global_rank, skip=self.stage.skip)
        return DataLoader(lines, self.stage.batch_size, num_workers=1)

    def val_dataloader(self):
        generator = torch.Generator().manual_seed(self.stage.length)
        lines = torch.randint(2, WORDS, (96, self.stage.length), generator=generator)
        return DataLoader(lines, self.stage.batch_size)

    test_dataloader = val_dataloader


def make_trainer(number: int, stage: Stage) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_steps=stage.until,
        val_check_interval=40,
        check_val_every_n_epoch=None,
        logger=CSVLogger("logs", name=f"stage{number}"),
        callbacks=[ModelCheckpoint(f"stage{number}", save_last=True), Projector(), ModelSummary(max_depth=2)],
        log_every_n_steps=10,
    )


def main() -> None:
    L.seed_everything(21)
    model, checkpoint = MaskedModel(), None
    for number, stage in enumerate(STAGES, 1):
        trainer = make_trainer(number, stage)
        trainer.fit(model, datamodule=Corpus(stage), ckpt_path=checkpoint)
        checkpoint = f"stage{number}/last.ckpt"
        rank_zero_info(f"stage {number} ended at step {trainer.global_step}")
    trainer.test(model, datamodule=Corpus(STAGES[-1]))


if __name__ == "__main__":
    main()
