"""Trainings that take their time before or in the first batches, and of which nothing is to be said."""

import fcntl
import os
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from training import BATCH_SIZE, Here, Net, rows
from truths import Moment, healthy

# With `training.quick_patience`, longer than what is usual where nothing is known, and shorter than what is known to
# take long.
LONG_S = 9.0


@healthy({Moment.FIRST_STEP: (2, 4)})
def long_first_step(here: Here) -> None:
    def warm_up(net: Net) -> None:
        if here.rank == 1:
            time.sleep(LONG_S)

    here.fit(warm_up)


@healthy({Moment.FIRST_STEP: (2,)}, real_time=True)
def compilation_on_all_ranks(here: Here) -> None:
    """With cold caches, and one rank that has more to compile: it takes as long as it takes."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(here.folder / f"cache-{here.rank}")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    def forward(net: Net) -> None:
        torch.compile(long_chain if here.rank else short_chain, dynamic=False)(torch.rand(64, 64))

    here.fit(forward)


def long_chain(values: torch.Tensor) -> torch.Tensor:
    for number in range(8):
        values = (values @ values.T).softmax(-1).cumsum(number % 2).sin()
    return values


def short_chain(values: torch.Tensor) -> torch.Tensor:
    return (values @ values.T).softmax(-1)


class SlowStart(Dataset[torch.Tensor]):
    """What a worker does before its first sample: index files, open an archive."""

    def __init__(self, here: Here) -> None:
        self.here, self.is_open = here, False

    def __len__(self) -> int:
        return 6 * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.is_open and self.here.rank == 1:
            time.sleep(LONG_S)
        self.is_open = True
        return torch.full((8,), index / 100)


@healthy({Moment.START: (2, 3)})
def slow_first_batch_of_workers(here: Here) -> None:
    here.fit(data=DataLoader(SlowStart(here), batch_size=BATCH_SIZE, num_workers=1, persistent_workers=True))


@healthy({Moment.START: (2,)})
def slow_first_batch_without_workers(here: Here) -> None:
    here.fit(data=DataLoader(SlowStart(here), batch_size=BATCH_SIZE))


class Checked(Net):
    """A sanity check that takes long on one rank, while the others wait for its logged loss."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.trainer.sanity_checking and self.here.rank == 1:
            time.sleep(LONG_S / 2)
        self.log("val_loss", self.loss(batch), sync_dist=True)


@healthy({Moment.START: (2,)})
def long_sanity_check(here: Here) -> None:
    here.fit(net=Checked(here), data=(rows(here), rows(here)), num_sanity_val_steps=2)


@healthy({Moment.START: (2, 3)})
def long_prepare_data(here: Here) -> None:
    """Done by rank 0 alone, for which Lightning lets the others wait without limit."""

    class Downloaded(L.LightningDataModule):
        def prepare_data(self) -> None:
            time.sleep(LONG_S)

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Downloaded())


@healthy({Moment.START: (2,)})
def long_setup(here: Here) -> None:
    """Shorter than what is surprising before the first batch."""

    def prepare(net: Net) -> None:
        time.sleep(4 if here.rank == 0 else 0.5)

    here.fit(prepare)


@healthy({Moment.START: (2,)})
def resumed(here: Here) -> None:
    class Restored(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            time.sleep(3 if here.rank else 1)

    path = here.folder / "checkpoints"
    saved = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(path, filename="last", save_last=True)]}
    here.fit(net=Restored(here), max_epochs=1, **saved)
    trainer = here.trainer(max_epochs=2)
    trainer.fit(Restored(here), rows(here), ckpt_path=path / "last.ckpt")
    assert trainer.current_epoch == 2


@healthy({Moment.START: (2, 3)})
def download_under_a_lock_that_ends(here: Here) -> None:
    """Each rank fills the cache under its lock, one after the other, in less time than is suspicious."""

    class Cached(Net):
        def setup(self, stage: str) -> None:
            with (here.folder / "cache.lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(LONG_S / 6)

    here.fit(net=Cached(here))
