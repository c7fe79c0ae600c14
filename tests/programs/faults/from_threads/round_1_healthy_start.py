"""Trainings of public threads that do odd things around their loop, and are right to."""

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from training import Here, MeetingNet, Net, rows
from truths import Moment, healthy


@healthy({Moment.START: (2,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/19266")
def data_prepared_by_one_process(here: Here) -> None:
    """Rank 0 makes the data, the others wait for it in the barrier behind `prepare_data`."""

    class Prepared(L.LightningDataModule):
        def prepare_data(self) -> None:
            time.sleep(3.5)
            torch.save(torch.rand(8 * 4 * here.world_size, 8), here.folder / "data.pt")

        def setup(self, stage: str) -> None:
            self.values = torch.load(here.folder / "data.pt")

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.values), batch_size=4)

    here.fit(data=Prepared(), max_epochs=1)


@healthy({Moment.START: (3,)}, source="https://github.com/huggingface/datasets/pull/2298")
def main_process_first(here: Here) -> None:
    """The barrier comes before the work on some ranks, and behind it on rank 0, so that these read what is cached."""

    class Mapped(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            for part in ("train", "test"):
                with first_on_rank_zero():
                    self.map(here.folder / part)

        def map(self, cache: Path) -> None:
            if not cache.exists():
                time.sleep(1.5)
                cache.write_text("mapped")

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Mapped(), max_epochs=1)


@contextlib.contextmanager
def first_on_rank_zero() -> Iterator[None]:
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


@healthy({Moment.START: (4,)}, source="https://github.com/mosaicml/composer/pull/2071")
def busy_wait_for_a_download(here: Here) -> None:
    """Ranks look for a file until the one that downloads is done, and meet in a barrier only then."""

    class Downloading(Net):
        def setup(self, stage: str) -> None:
            signal_file = here.folder / ".downloaded"
            if here.rank == 0:
                time.sleep(3)
                signal_file.touch()
            while not signal_file.exists():
                time.sleep(0.1)
            dist.barrier()
            if here.rank == 0:
                signal_file.unlink()

    here.fit(net=Downloading(here), max_epochs=1)


@healthy({Moment.START: (2,)}, source="https://github.com/huggingface/transformers/pull/16487")
def process_group_made_by_the_user(here: Here) -> None:
    """There is a process group already when the Trainer comes, and one more beside it."""
    dist.init_process_group("gloo", rank=here.rank, world_size=here.world_size)
    side = dist.new_group()

    def average(net: Net) -> None:
        dist.all_reduce(torch.ones(3), group=side)

    here.fit(average, max_epochs=1)
    dist.barrier()
    dist.destroy_process_group()


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/pytorch/torchtitan/pull/148")
def garbage_collected_on_all_ranks_at_once(here: Here) -> None:
    """The collector is switched off, and called every other step, with many objects on one of the ranks."""
    kept = [[number] for number in range(1_500_000 if here.rank == 1 else 1000)]

    class Collecting(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            gc.disable()

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step % 2 == 0:
                gc.collect()

        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            gc.enable()

    here.fit(callbacks=[Collecting()])
    assert kept


@healthy({Moment.CHECKPOINT: (2,)}, source="https://github.com/sdatkinson/neural-amp-modeler/pull/600")
def save_that_is_tried_again(here: Here) -> None:
    """Writing fails twice; whoever writes tries again, and comes to the barrier that the others wait in."""
    failures = iter([OSError(5, "Input/output error"), PermissionError(13, "Permission denied")])

    class Flaky(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            for error in failures:
                raise error
            super().save_checkpoint(checkpoint, path, storage_options)

    class Patient(ModelCheckpoint):
        def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
            for attempt in range(4):
                try:
                    super()._save_checkpoint(trainer, filepath)
                    return
                except OSError as error:
                    print(f"attempt {attempt}: {error}")
                    time.sleep(0.7)

    here.fit(enable_checkpointing=True, callbacks=[Patient(here.folder / "checkpoints")], plugins=[Flaky()])


@healthy({Moment.EPOCH_END: (2,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/839")
def folds_one_after_the_other(here: Here) -> None:
    """A model and a Trainer for each fold, in the same processes; results are gathered between them."""
    scores = []
    for fold in range(3):
        net, trainer = MeetingNet(here), here.trainer(max_epochs=1)
        trainer.fit(net, rows(here, batches=4 + fold), rows(here, batches=2))
        everywhere: list[Any] = [None] * here.world_size
        dist.all_gather_object(everywhere, trainer.callback_metrics["val_loss"].item())
        scores.append(everywhere)
    assert len(scores) == 3


@healthy({Moment.VALIDATION: (4,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/5707")
def texts_gathered_and_scored_on_rank_zero(here: Here) -> None:
    """Predictions of unequal size go to rank 0, which scores them for a while; a barrier holds the others."""

    class Answering(Net):
        def on_validation_epoch_start(self) -> None:
            self.answers: list[str] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.answers.append("word " * (batch_idx + 1000 * self.global_rank))

        def on_validation_epoch_end(self) -> None:
            everything = [None] * here.world_size if here.rank == 0 else None
            dist.gather_object(self.answers, everything, dst=0)
            if here.rank == 0:
                time.sleep(1.8)
                (here.folder / "answers.txt").write_text(str(everything)[:1000])
            dist.barrier()

    here.fit(net=Answering(here), data=(rows(here), rows(here)))


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/pytorch/pytorch/pull/74701")
def ring_of_neighbours(here: Here) -> None:
    """Each rank sends to the next and receives from the one before, in one batch, while one of them is slow."""

    class Ring(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if here.rank == batch_idx % here.world_size:
                time.sleep(0.8)
            ours, theirs = torch.full((5000,), float(here.rank)), torch.empty(5000)
            after, before = (here.rank + 1) % here.world_size, (here.rank - 1) % here.world_size
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, ours, after), dist.P2POp(dist.irecv, theirs, before)]
            )
            for work in works:
                work.wait()

    here.fit(net=Ring(here), max_epochs=1)


@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/pytorch/pytorch/issues/25390")
def pairs_that_all_ranks_have_made(here: Here) -> None:
    """All ranks make both groups; each uses its own, one of the pairs more often than the other."""

    class Paired(Net):
        def on_train_start(self) -> None:
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            self.pair = pairs[here.rank // 2]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for _ in range(3 if here.rank < 2 else 1):
                time.sleep(0.1 * here.rank)
                dist.all_reduce(torch.ones(7), group=self.pair)

    here.fit(net=Paired(here), max_epochs=1)


@healthy({Moment.END: (2,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/8375")
def fit_on_all_and_test_on_one(here: Here) -> None:
    """The process group is given up after `fit`; rank 0 tests alone, with a Trainer that knows of no other rank."""
    net = Evaluating(here)
    here.fit(net=net, max_epochs=1)
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if is_first:
        alone = {"logger": False, "enable_progress_bar": False, "default_root_dir": here.folder}
        L.Trainer(accelerator="cpu", devices=1, strategy="auto", **alone).test(net, rows(here))


class Evaluating(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.3)
        self.log("test_loss", self.loss(batch))


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/kyutai-labs/pocket-tts/pull/277")
def stop_that_ranks_agree_about(here: Here) -> None:
    """One rank is signalled; the flag is reduced after each step, and all save and stop behind the same one."""

    class Preemptible(L.Callback):
        is_told = False

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            signal.signal(signal.SIGUSR2, lambda number, frame: setattr(self, "is_told", True))

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if here.rank == 2 and trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGUSR2)
            flag = torch.tensor(int(self.is_told))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag and not trainer.should_stop:
                trainer.save_checkpoint(here.folder / "preempted.ckpt")
                trainer.should_stop = True

    here.fit(callbacks=[Preemptible()])


@healthy({Moment.END: (3,)}, source="https://github.com/Red-Hat-AI-Innovation-Team/mini_trainer/pull/79")
def all_leave_at_the_same_step(here: Here) -> None:
    """The first half of a run: all ranks save, take leave of each other, and exit from the midst of an epoch."""

    class FirstHalf(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(here.folder / "half.ckpt")
                dist.barrier()
                sys.exit(0)

    here.fit(callbacks=[FirstHalf()])


@healthy({Moment.VALIDATION: (2,)}, source="https://github.com/Lightning-AI/torchmetrics/pull/1107")
def metric_of_rank_zeros_own_share(here: Here) -> None:
    """A metric that does not synchronise is computed under `rank_zero_only`, with a little work before."""

    class Sampled(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.error = torchmetrics.MeanSquaredError(sync_on_compute=False)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.error.update(batch[0], batch[0].flip(0))

        @rank_zero_only
        def on_validation_end(self) -> None:
            time.sleep(1.5)
            (here.folder / "error.txt").write_text(str(self.error.compute()))

    here.fit(net=Sampled(here), data=(rows(here), rows(here)))


@healthy({Moment.START: (3,)}, source="https://github.com/Lightning-AI/pytorch-lightning/pull/15304")
def learning_rate_found_by_all_ranks(here: Here) -> None:
    class Tunable(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.lr = 0.1

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    net, trainer = Tunable(here), here.trainer(max_epochs=1)
    Tuner(trainer).lr_find(net, rows(here), num_training=8, early_stop_threshold=None)
    trainer.fit(net, rows(here))


@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/5243")
def batch_that_all_ranks_skip(here: Here) -> None:
    """Whether a loss is usable is agreed upon before the backward pass, and then no rank makes one."""

    class Agreeing(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, loss = self.optimizers(), self.loss(batch)
            if here.rank == 1 and batch_idx in (2, 3):
                loss = loss * float("nan")
            is_bad = (~loss.isfinite()).int()
            dist.all_reduce(is_bad)
            if is_bad:
                return
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    here.fit(net=Agreeing(here))


@healthy({Moment.END: (2,)}, source="https://github.com/GoogleCloudPlatform/gcs-connector-for-pytorch/pull/116")
def checkpoints_written_in_a_thread(here: Here) -> None:
    """Saving costs the training nothing; at its end rank 0 waits for the last one to be written."""

    class Bucket(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            time.sleep(1.2)
            super().save_checkpoint(checkpoint, path, storage_options)

    callback = ModelCheckpoint(here.folder / "checkpoints", save_top_k=-1, every_n_train_steps=4)
    here.fit(enable_checkpointing=True, callbacks=[callback], plugins=[AsyncCheckpointIO(Bucket())])


@healthy({Moment.EPOCH_END: (4,)}, source="https://github.com/pytorch/pytorch/pull/53787")
def monitored_barriers(here: Here) -> None:
    """A barrier that names who is missing, behind work that takes each rank another time."""

    def wait_for_all(net: Net) -> None:
        time.sleep(0.7 * here.rank)
        dist.monitored_barrier()

    here.fit(wait_for_all)
