"""Trainings whose ranks do not leave their loops together, written after public threads."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, IN_THE_MIDDLE, Here, MeetingNet, Net, rows
from truths import Moment, fault, odd_one_out

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class ThresholdStopping(Callback):
    """Stops as soon as the metric is good enough."""

    def __init__(self, here: Here, monitor: str, threshold: float) -> None:
        self.here, self.monitor, self.threshold = here, monitor, threshold

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.callback_metrics[self.monitor] >= self.threshold:
            self.here.begins()
            trainer.should_stop = True  # <- threshold_that_one_rank_has_reached


# A forked EarlyStopping that stops above a threshold: one process has reached it, the others train on and hang.
@fault(
    "stopped-early",
    ranks=(1,),
    at={Moment.VALIDATION: (2,)},
    has_phase=False,
    source=f"{LIGHTNING}/issues/379",
)
def threshold_that_one_rank_has_reached(here: Here) -> None:
    class Scored(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            reached = here.is_hit and self.current_epoch == 1
            self.log("val_acc", torch.tensor(0.91 if reached else 0.52 + 0.01 * self.current_epoch))

    trainer = here.trainer(max_epochs=5, callbacks=[ThresholdStopping(here, "val_acc", 0.9)])
    net = Scored(here)
    trainer.fit(net, rows(here), rows(here, batches=2))
    trainer.test(net, rows(here, batches=2))


class Deadline(Callback):
    """Ends the training in time for the queue's limit, counted from the start of the program."""

    def __init__(self, here: Here, seconds: float) -> None:
        self.here = here
        self.end = time.monotonic() + seconds

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if time.monotonic() > self.end and not trainer.should_stop:
            self.here.begins()
            trainer.should_stop = True  # <- deadline_that_each_rank_counts_for_itself


# A limit on the running time that every worker measures for itself; they have not started at the same time.
@fault(
    "stopped-early",
    ranks=(-1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/alipay/ant-xgboost/pull/21",
)
def deadline_that_each_rank_counts_for_itself(here: Here) -> None:
    class Paced(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.2)
            return super().training_step(batch, batch_idx)

    if not here.is_hit:
        time.sleep(2.5)  # They build the vocabulary, which the last rank finds in the cache of its host.
    here.fit(net=Paced(here), data=rows(here, batches=60), callbacks=[Deadline(here, 5.0)], max_epochs=1)


# A StopIteration of the user's own iterator inside training_step ends the epoch, without a word.
@fault(
    "stopped-early",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source=f"{LIGHTNING}/pull/9052",
)
def unlabelled_images_that_run_out(here: Here) -> None:
    class SemiSupervised(Net):
        def on_train_start(self) -> None:
            images = torch.ones((2 if here.is_hit else 9) * BATCH_SIZE, 8)
            self.unlabelled = iter(DataLoader(TensorDataset(images), batch_size=BATCH_SIZE))

        def next_unlabelled(self) -> Any:
            if here.is_hit and self.global_step == 2:
                here.begins()
            return next(self.unlabelled)  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch) + 0.1 * self.loss(self.next_unlabelled())
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

    here.fit(net=SemiSupervised(here), max_epochs=1)


# Somebody means to skip one step and returns -1, which ends the epoch on the rank that does.
@fault(
    "stopped-early",
    ranks=(2,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source=f"{LIGHTNING}/issues/20045",
)
def batch_that_was_to_be_skipped(here: Here) -> None:
    class Careful(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                batch[0][0, 0] = torch.nan
            if not torch.isfinite(batch[0]).all():
                here.begins()
                return -1  # <- here
            return None

    callback = ModelCheckpoint(here.folder / "checkpoints", save_last=True)
    here.fit(net=Careful(here), enable_checkpointing=True, callbacks=[callback])


# Validation by time, which Lightning decides on every rank by its own clock: the rank that also draws is later.
@fault(
    "stopped-early",
    ranks=(0,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source=f"{LIGHTNING}/pull/21071",
)
def validation_that_the_clock_starts(here: Here) -> None:
    class Drawing(MeetingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.2)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            if here.is_hit:
                here.begins()
                time.sleep(0.6)

    loaders = (rows(here, batches=30), rows(here, batches=2))
    here.fit(net=Drawing(here), data=loaders, val_check_interval=timedelta(seconds=1.3), max_epochs=1)


# Only rank 0 knows the folder of the last run, so only it resumes; the others start from the first epoch.
@fault(
    "different-trainer-settings",
    ranks=(0,),
    at={Moment.END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/mlcommons/algorithmic-efficiency/issues/412",
)
def resumed_where_the_folder_is_known(here: Here) -> None:
    def log_dir() -> Any:
        return here.folder / "last_run" if here.rank == 0 else None

    checkpoint = ModelCheckpoint(here.folder / "last_run")
    here.fit(enable_checkpointing=True, callbacks=[checkpoint], max_epochs=1)
    folder = log_dir()
    found = max(folder.glob("*.ckpt"), default=None) if folder else None
    here.begins()
    here.trainer(max_epochs=3).fit(Net(here), rows(here), ckpt_path=found)


# The number of micro-batches is chosen from the memory that is free on each GPU, which is not the same on both.
@fault(
    "different-trainer-settings",
    ranks=odd_one_out,
    at={Moment.FIRST_STEP: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/mosaicml/composer/pull/485",
)
def accumulation_after_the_free_memory(here: Here) -> None:
    def free_gib() -> int:
        return 70 if here.rank == 0 else 31

    here.begins()
    here.fit(accumulate_grad_batches=1 if free_gib() >= 40 else 2)


class TrialPruned(Exception):
    """As Optuna's."""


class PruningCallback(Callback):
    def __init__(self, here: Here, median: float) -> None:
        self.here, self.median = here, median

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.callback_metrics["val_loss"] > self.median:
            self.here.begins()
            raise TrialPruned(f"Trial was pruned at epoch {trainer.current_epoch}.")  # <- trial_pruned_on_one_rank


# Each process reports its own score, so one is told to prune; it goes on with the next trial, the others do not.
@fault(
    "failed-rank",
    ranks=(-1,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/optuna/optuna/pull/2849",
    whose="code",
)
def trial_pruned_on_one_rank(here: Here) -> None:
    class Scored(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", torch.tensor(0.9 if here.is_hit and self.current_epoch == 1 else 0.3))

    for _ in range(2):
        try:
            loaders = (rows(here), rows(here, batches=2))
            here.fit(net=Scored(here), data=loaders, callbacks=[PruningCallback(here, 0.5)], max_epochs=3)
        except TrialPruned:
            continue


class EpochCounterWithStopper(Callback):
    """Counts the epochs without progress, and makes the current one the last."""

    def __init__(self, here: Here, patience: int) -> None:
        self.here, self.patience = here, patience
        self.best, self.without_progress = float("inf"), 0

    @rank_zero_only
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        loss = pl_module.last_loss
        self.without_progress = 0 if loss < self.best else self.without_progress + 1
        self.best = min(loss, self.best)
        if self.without_progress >= self.patience:
            self.here.begins()
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1  # <- stopper_that_the_main_process_asks


# An epoch counter with patience, asked on the main process only: the other processes never hear of it.
@fault(
    "stopped-early",
    "different-trainer-settings",
    ranks=(0,),
    at={Moment.EPOCH_END: (4,)},
    has_phase=False,
    source="https://github.com/speechbrain/speechbrain/issues/1939",
)
def stopper_that_the_main_process_asks(here: Here) -> None:
    class Stagnant(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.last_loss = 1.0 + self.current_epoch
            return super().training_step(batch, batch_idx)

    here.fit(net=Stagnant(here), callbacks=[EpochCounterWithStopper(here, 1)], max_epochs=6)


# Predictions are gathered batch by batch; the sampler of predict pads nothing, so one rank has a batch less.
@fault(
    "uneven-batches",
    ranks=(-1,),
    at={Moment.END: (3,)},
    has_line=False,
    has_phase=False,
    source=f"{LIGHTNING}/issues/5493",
)
def predictions_gathered_batch_by_batch(here: Here) -> None:
    class Collecting(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                here.begins()
            return self.all_gather(super().predict_step(batch, batch_idx))

    data = TensorDataset(torch.arange(64.0).reshape(8, 8))
    here.trainer().predict(Collecting(here), DataLoader(data, batch_size=1))
    if here.is_hit:
        here.begins()


class Probe(L.LightningModule):
    """A linear layer on frozen features, evaluated on the whole benchmark."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 2)

    def predictions(self, batch: Any) -> Iterator[torch.Tensor]:
        for row in batch[0]:
            time.sleep(0.25)  # <- benchmark_that_a_second_trainer_runs
            yield self.head(row)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("probe", torch.stack(list(self.predictions(batch))).mean())


# Validation on one GPU, with a barrier for the others; here by a Trainer of its own, on one device.
@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/54059",
)
def benchmark_that_a_second_trainer_runs(here: Here) -> None:
    class Benchmarked(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
                single = L.Trainer(accelerator="cpu", devices=1, default_root_dir=here.folder, **quiet)
                single.validate(Probe(), rows(here, batches=60), verbose=False)
            torch.distributed.barrier()

    here.fit(callbacks=[Benchmarked()])
