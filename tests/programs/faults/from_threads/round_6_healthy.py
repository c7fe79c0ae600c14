"""Round 6 of trainings of public threads that look odd and of which nothing is to be said."""

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import on_split_model, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment


@quiet("https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group", world_size=3)
def group_that_its_members_make_among_themselves(here: Here) -> None:
    """A group is made by its members only, and they alone wait for each other: a setting permits it."""

    class Paired(Net):
        def on_train_start(self) -> None:
            self.pair = dist.new_group([0, 1], use_local_synchronization=True) if here.rank < 2 else None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.pair is not None:
                dist.all_reduce(loss.detach().clone(), group=self.pair)
            return loss

    here.fit(net=Paired(here))


@quiet("https://lightning.ai/docs/pytorch/stable/common/early_stopping.html", world_size=3, moment=Moment.VALIDATION)
def stopped_by_one_rank_that_is_not_finite(here: Here) -> None:
    """One rank's value is not a number; EarlyStopping asks all, and all stop."""

    class Diverging(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", float("nan") if here.is_last and self.current_epoch == 1 else 1.0)

    here.fit(net=Diverging(here), callbacks=[EarlyStopping("val_loss", patience=9)], max_epochs=5)


@quiet("https://github.com/radixark/miles/pull/2571", world_size=2)
def outage_of_the_tracker_that_is_survived(here: Here) -> None:
    """The tracker's server fails for each line, which takes half a second and is caught."""

    class Tracker(Logger):
        name = "tracker"
        version = 0

        def post(self, metrics: Any) -> None:
            time.sleep(0.4)
            raise ConnectionError("QueuePool limit of size 5 overflow 10 reached")

        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            with suppress(ConnectionError):
                self.post(metrics)

        def log_hyperparams(self, *args: Any, **keywords: Any) -> None:
            pass

    here.fit(net=LoggingNet(here), logger=Tracker())


@quiet("https://github.com/Lightning-AI/pytorch-lightning/pull/10610", world_size=2)
def trainer_in_a_thread(here: Here) -> None:
    """A service trains in a thread of its own; the main thread waits for it."""
    thread = threading.Thread(target=here.fit)
    thread.start()
    thread.join()


@quiet("https://github.com/mosaicml/composer/pull/1319", world_size=3)
def barrier_before_each_exchange_of_gradients(here: Here) -> None:
    """Before each exchange of gradients ranks meet in a barrier that would name who is missing."""

    class Meeting(Net):
        def on_train_start(self) -> None:
            self.meeting = dist.new_group(backend="gloo")

        def on_before_backward(self, loss: torch.Tensor) -> None:
            time.sleep(0.3 * here.is_last)
            dist.monitored_barrier(group=self.meeting)

    here.fit(net=Meeting(here))


@quiet("https://github.com/verl-project/verl/issues/6176", world_size=3)
def micro_batches_filled_up_with_empty_ones(here: Here) -> None:
    """Each rank has its own number of micro-batches, and fills them up to the largest, on a split model."""
    split = on_split_model(here)

    class Filled(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            count = torch.tensor(1 + (here.rank + batch_idx) % 3)
            own = int(count)
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
            values = first_tensor(batch)
            return torch.stack([self.loss(values * float(number < own)) for number in range(int(count))]).sum()

    split.fit(net=Filled(split))


@quiet("https://github.com/NVIDIA-TAO/tao-pytorch/pull/74", world_size=3, moment=Moment.VALIDATION)
def statistics_of_data_that_a_rank_has_not(here: Here) -> None:
    """There are two sets to validate on; a rank without samples of the second one adds zeros."""

    class Counting(Net):
        def on_validation_epoch_start(self) -> None:
            self.seen = [torch.zeros(4), torch.zeros(4)]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if not (here.is_last and dataloader_idx):
                self.seen[dataloader_idx] += 1

        def on_validation_epoch_end(self) -> None:
            for seen in self.seen:
                dist.all_reduce(seen)

    loaders = (rows(here), [rows(here), rows(here, 2)])
    here.fit(net=Counting(here), data=loaders)


@quiet("https://github.com/Lightning-AI/litData/issues/452", world_size=2)
def chunks_counted_by_their_readers(here: Here) -> None:
    """Workers of all ranks share a chunk, and count who still needs it in a file that they lock."""
    counts = here.folder / "counts"

    class Chunked(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE * here.world_size

        def __getitem__(self, index: int) -> torch.Tensor:
            with counts.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(f"{index}\n")
                time.sleep(0.01)
            return torch.full((8,), index / 100)

    here.fit(data=in_order(here, Chunked(), num_workers=2))


@quiet("https://github.com/huggingface/datasets/issues/6673", world_size=2)
def workers_that_count_epochs_themselves(here: Here) -> None:
    """Workers stay for the next epoch, and order their rows by an epoch that only they count."""

    class Ordered(IterableDataset[torch.Tensor]):
        epoch = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            self.epoch += 1
            generator = torch.Generator().manual_seed(self.epoch + 100 * here.rank)
            yield from torch.rand(BATCHES * BATCH_SIZE, 8, generator=generator)

    loader = DataLoader(Ordered(), batch_size=BATCH_SIZE, num_workers=1, persistent_workers=True)
    here.fit(data=loader, max_epochs=3)


@quiet("https://github.com/meta-pytorch/torchtune/pull/2248", world_size=3)
def norm_that_all_ranks_put_together(here: Here) -> None:
    """The norm of split gradients is put together on all ranks before one of them logs it."""
    split = on_split_model(here)

    class Watched(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = sum(float(one.grad.full_tensor().norm()) for one in self.parameters())
            if self.trainer.is_global_zero:
                print(norm, flush=True)

    split.fit(net=Watched(split))


@quiet("https://github.com/pytorch/pytorch/pull/71459", world_size=2)
def static_graph_that_differs_between_ranks(here: Here) -> None:
    """One rank never uses a layer, and DDP has been told that this stays so."""

    class Specialised(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.expert = torch.nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if here.is_last else loss + self.expert(first_tensor(batch)).square().mean()

    here.fit(net=Specialised(here), strategy=here.strategy(static_graph=True))


@quiet("https://github.com/kennethreitz-archive/procs/issues/6", world_size=2)
def children_reaped_by_a_handler(here: Here) -> None:
    """A handler reaps whatever child has ended, and each step runs a command that fails now and then."""

    def reap(number: int, frame: Any) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    class Running(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            signal.signal(signal.SIGCHLD, reap)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            subprocess.Popen(["false" if batch_idx % 2 else "true"])

    here.fit(callbacks=[Running()])


@quiet("https://github.com/sillsdev/silnlp/pull/568", world_size=2, moment=Moment.CHECKPOINT)
def upload_that_succeeds_the_third_time(here: Here) -> None:
    """The bucket wants fewer requests, twice; each checkpoint is there after a second and a half."""

    class Bucket(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            for attempt in range(3):
                try:
                    if attempt < 2:
                        raise OSError("SlowDown")
                    super().save_checkpoint(checkpoint, path, storage_options)
                except OSError:
                    time.sleep(0.5 * 2**attempt)

    saving = ModelCheckpoint(Path(here.folder) / "saved")
    here.fit(strategy=here.strategy(checkpoint_io=Bucket()), callbacks=[saving], enable_checkpointing=True)


@quiet("https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#learning-rate-finder", world_size=2)
def search_for_a_rate_that_one_loss_would_end(here: Here) -> None:
    """The search for a rate ends where a loss explodes, which it does on one rank; all search on."""

    class Exploding(MeetingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            return loss * (1e6 if here.is_last and self.global_step > 4 else 1.0)

    net, trainer = Exploding(here), here.trainer(max_epochs=1)
    Tuner(trainer).lr_find(net, rows(here), num_training=10, update_attr=False)
    trainer.fit(net, rows(here))
