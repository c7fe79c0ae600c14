"""Trains to the end; again up to a step, where a checkpoint is made; and from there on. Prints what each came to.

Run by the tests on every rank: ``python resumed_fit.py FOLDER``. What is not saved is different in what goes on: all
random numbers, and the objects of the first training.
"""

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ncclsafe import JustInTimeCheckpoint, SafeDDP
from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.checkpoints.position import capture

ROWS = torch.randn(44, 8, generator=torch.Generator().manual_seed(0))
# Of each rank: 11 batches in an epoch, and with three to a window a shorter window at the end.
BATCH, WINDOW, EPOCHS = 2, 3, 2


class Noisy(Dataset[Any]):
    """Data that is augmented at random; which samples were loaded is kept."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return ROWS[index] + random.random()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS[dist.get_rank() :: dist.get_world_size()])


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Enough(Exception):
    """Raised on all ranks, once the checkpoint is there."""


class StopAt(L.Callback):
    """Makes the checkpoint that is gone on from, as it is made where a run is being ended."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.positions: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.fit_loop._should_accumulate():
            self.positions = [None] * trainer.world_size
            dist.all_gather_object(self.positions, capture(trainer))
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / f"step={self.step}.ckpt")
            raise Enough

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        positions = dict(enumerate(self.positions))
        checkpoint[KEY] = {"version": 1, "world_size": trainer.world_size, "positions": positions}


def fit(folder: Path, data: Dataset[Any], *callbacks: Any, goes_on: bool = False) -> Mapping[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Model()
    if goes_on:
        random.seed(77)
        torch.manual_seed(77)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=EPOCHS,
        accumulate_grad_batches=WINDOW,
        callbacks=[JustInTimeCheckpoint(folder / "checkpoints", resume=True), *callbacks],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shuffle = isinstance(data, Noisy)
    loader = DataLoader(data, batch_size=BATCH, shuffle=shuffle)
    with suppress(Enough):
        trainer.fit(model, loader)
    weights = torch.cat([part.flatten() for part in model.state_dict().values()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    loaded = len(getattr(data, "loaded", ()))
    return {"weights": digest, "step": trainer.global_step, "batches": model.seen, "loaded": loaded}


def main() -> None:
    folder = Path(sys.argv[1])
    told: dict[str, Any] = {"whole": fit(folder / "none", Noisy())}
    for step in (2, 4, 6):
        fit(folder / f"{step}", Noisy(), StopAt(step))
        told[f"from {step}"] = fit(folder / f"{step}", Noisy(), goes_on=True)
    fit(folder / "stream", Stream(), StopAt(2))
    told["stream"] = fit(folder / "stream", Stream(), goes_on=True)
    if dist.get_rank() == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
