"""Round 14 after public threads: what users of Lightning do that looks odd, and of which nothing is to be said."""

import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_14_lightning import LIGHTNING, ErrorRate
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from threads import quiet
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment


class Endless(IterableDataset[torch.Tensor]):
    """The share of a rank, again and again."""

    def __init__(self, share: torch.Tensor) -> None:
        self.share = share

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in count():
            yield self.share[number % len(self.share)]


class Shares(MeetingNet):
    """Validates on as many batches as the smallest of all shares has."""

    def on_fit_start(self) -> None:
        batches = torch.tensor([self.here.rank + 2], device=self.device)
        dist.all_reduce(batches, op=dist.ReduceOp.MIN)
        self.trainer.limit_val_batches = int(batches)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        time.sleep(0.2 * self.here.rank)
        super().validation_step(batch, batch_idx)


@quiet(f"{LIGHTNING}/issues/20404", world_size=3, moment=Moment.EPOCH_END)
def shares_of_unequal_size_without_an_end(here: Here) -> None:
    """Shares for training have no end, and so many steps are made; of those for validation the first part is taken."""
    train = DataLoader(Endless(torch.rand(7 + 5 * here.rank, 8)), BATCH_SIZE)
    validation = DataLoader(TensorDataset(torch.rand((here.rank + 2) * BATCH_SIZE, 8)), BATCH_SIZE)
    more: dict[str, Any] = {
        "max_epochs": -1,
        "max_steps": 3 * BATCHES,
        "val_check_interval": BATCHES,
        "check_val_every_n_epoch": None,
    }
    here.fit(net=Shares(here), data=(train, validation), use_distributed_sampler=False, **more)


class Averaging(L.Callback):
    """Keeps an average of the weights, with which all ranks validate."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in module.state_dict().items():
            self.average.setdefault(name, value.detach().clone()).lerp_(value, 0.1)

    def swapped(self, module: L.LightningModule) -> None:
        for name, value in module.state_dict().items():
            kept = value.clone()
            value.copy_(self.average[name])
            self.average[name] = kept

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.swapped(module)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            time.sleep(1.0)
            torch.save(module.state_dict(), Path(trainer.default_root_dir) / "average.pt")
        self.swapped(module)


@quiet("https://github.com/mllam/neural-lam/pull/739", world_size=2, moment=Moment.VALIDATION)
def averaged_weights_swapped_for_validation(here: Here) -> None:
    """All ranks swap weights for their average and back; the first one writes the average meanwhile."""
    saving = ModelCheckpoint(here.folder / "saved", save_top_k=-1)
    more: dict[str, Any] = {"callbacks": [Averaging(), saving], "enable_checkpointing": True}
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), **more)


@quiet(f"{LIGHTNING}/pull/7403", world_size=3, moment=Moment.END)
def trainers_that_log_into_folders_of_their_own(here: Here) -> None:
    """All ranks ask where each trainer logs, which is the same for all of them; the first one leaves a note there."""
    for width in (8, 16):
        trainer = here.trainer(max_epochs=1, logger=CSVLogger(str(here.folder), name=f"width-{width}"))
        net = LoggingNet(here)
        trainer.fit(net, rows(here))
        folder = Path(trainer.log_dir or here.folder)
        if trainer.is_global_zero:
            time.sleep(1.0)
            (folder / "note.json").write_text(json.dumps({"width": width}))
        trainer.strategy.barrier()
        print(json.loads((folder / "note.json").read_text()), flush=True)
        trainer.test(net, rows(here, batches=2), verbose=False)


class Shown(Net):
    """Shows the error rate of each epoch in the bar of the first rank."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.error_rate = ErrorRate()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2 if self.here.rank == batch_idx % 2 else 0.0)
        self.error_rate.update(self.layers(first_tensor(batch)).detach())
        self.log("error_rate", self.error_rate, on_step=False, on_epoch=True, prog_bar=True)
        return self.loss(batch)


@quiet(f"{LIGHTNING}/issues/21264", world_size=2, moment=Moment.EPOCH_END)
def metric_in_the_bar_of_the_first_rank(here: Here) -> None:
    """Only the first rank has a bar, and shows a metric that all ranks compute at the end of each epoch."""
    here.fit(net=Shown(here), callbacks=[TQDMProgressBar()], enable_progress_bar=True)
