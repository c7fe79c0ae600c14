"""Round 21 after public threads: ranks that differ in work, clocks and settings, and meet all the same."""

import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from from_threads.round_15_lightning import LIGHTNING
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from samples import Stream
from threads import quiet
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from training import BATCH_SIZE, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment


class Packed(Net):
    """Goes through a batch in parts, more of them on some ranks, and exchanges gradients with the last one."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        *first, last = first_tensor(batch).chunk(4 if self.here.is_last else 1)
        for part in first:
            time.sleep(0.3)
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(part))
        with optimizer.toggle_model(sync_grad=True):
            self.manual_backward(self.loss(last))
        optimizer.step()


@quiet("https://github.com/roboflow/rf-detr/pull/1443", world_size=3)
def parts_of_a_batch_of_which_only_the_last_is_exchanged(here: Here) -> None:
    """The last rank makes four backward passes for each one of the others, and exchanges as many gradients as they."""
    here.fit(net=Packed(here), max_epochs=1)


class Paced(LoggingNet):
    """Takes its time for each step, and one rank has begun earlier."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)


@quiet(f"{LIGHTNING}/pull/21106", world_size=3)
def checkpoint_by_the_clock_of_the_first_rank(here: Here) -> None:
    """Clocks differ by a second; Lightning asks the first rank whether it is time for a checkpoint."""
    saving = ModelCheckpoint(here.folder / "saved", train_time_interval=timedelta(seconds=1.5), save_top_k=-1)
    if not here.is_last:
        time.sleep(1.0)
    here.fit(
        net=Paced(here),
        data=rows(here, batches=20),
        callbacks=[saving],
        enable_checkpointing=True,
        max_epochs=1,
    )


@quiet("https://github.com/wandb/wandb/issues/5695", world_size=4)
def settings_of_the_first_rank_that_change_nothing(here: Here) -> None:
    """The first rank has a logger, a callback for it and another interval of logging, none of which exchanges."""
    only_here: dict[str, Any] = {}
    if here.rank == 0:
        logger = CSVLogger(here.folder)
        only_here = {"logger": logger, "callbacks": [LearningRateMonitor("step")], "log_every_n_steps": 2}
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), **only_here)


class Mixed(LoggingNet):
    """Sees a batch without labels beside each one with labels, as long as there are any."""

    def on_train_epoch_start(self) -> None:
        self.unlabelled = iter(DataLoader(Stream(IN_THE_MIDDLE, first=self.here.rank), BATCH_SIZE))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.4 if self.here.is_last else 0.0)
        return super().training_step(batch, batch_idx) + 0.1 * self.loss(next(self.unlabelled))


@quiet("https://github.com/Lightning-AI/litgpt/issues/603", world_size=2, moment=Moment.EPOCH_END)
def unlabelled_batches_that_run_out_on_all_ranks(here: Here) -> None:
    """All ranks leave their epochs by a StopIteration in the same step, in the middle of what is labelled."""
    here.fit(net=Mixed(here), max_epochs=3)


class Watched(MeetingNet):
    """The first rank computes what it has measured by itself, without asking the others, and writes it down slowly."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.error = MeanMetric(sync_on_compute=False)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.error.update(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            time.sleep(1.5)
            (self.here.folder / "error").write_text(f"{self.error.compute():.3f}")
        self.error.reset()


class Stopping(L.Callback):
    """One rank wants to stop in the last step of all, in which the training ends anyhow."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if (
            self.here.is_last
            and trainer.current_epoch == 1
            and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ):
            trainer.should_stop = True


@quiet("https://github.com/Lightning-AI/torchmetrics/issues/938", world_size=3, moment=Moment.VALIDATION)
def metric_of_the_first_rank_that_asks_nobody(here: Here) -> None:
    """The first rank computes a metric that is not to be exchanged; the last one asks for a stop in the last step."""
    here.fit(net=Watched(here), data=(rows(here), rows(here, batches=2)), callbacks=[Stopping(here)])
