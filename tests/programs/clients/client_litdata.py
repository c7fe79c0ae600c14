"""litdata: a stream of samples from chunks on disk, which its own loader shares among ranks."""

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter
from train import SEED, Run

REQUIREMENTS = ["litdata"]
MONITOR = "train_loss"
SAMPLES = 160


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.step(batch)
        self.log("train_loss", loss)
        return loss


def written(folder: Path) -> str:
    """The folder with all samples in it, in chunks; ranks that start together write a part each."""
    if (folder / "index.json").exists():
        return str(folder)
    rank, ranks = (int(os.environ.get(name, usual)) for name, usual in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")))
    writer = BinaryWriter(str(folder), chunk_size=20)
    for index in range(SAMPLES // ranks):
        writer[index] = torch.rand(32, generator=torch.Generator().manual_seed(rank * SAMPLES + index))
    writer.done()
    writer.merge()
    return str(folder)


def train(run: Run) -> None:
    data = StreamingDataset(written(run.folder / "data"), shuffle=True, seed=SEED)
    loader = StreamingDataLoader(data, batch_size=4, drop_last=True)
    pl.Trainer(**run.kwargs()).fit(Model(), loader, ckpt_path=run.ckpt_path)
