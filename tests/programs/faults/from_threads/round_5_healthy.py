"""Round 5 of trainings of public threads that look odd and of which nothing is to be said."""

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, MeetingNet, Net, first_tensor
from truths import Moment


@quiet("https://github.com/vllm-project/speculators/pull/867", world_size=3, moment=Moment.VALIDATION)
def validation_that_takes_each_rank_another_time(here: Here) -> None:
    """Validation takes seconds on all ranks, a second more on the last one, and they meet at its end."""

    class Thorough(MeetingNet):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            time.sleep(0.6 if here.is_last else 0.4)
            super().validation_step(batch, batch_idx)

    here.fit(net=Thorough(here))


@quiet("https://github.com/clovaai/stargan-v2/issues/52", world_size=3, moment=Moment.FIRST_STEP)
def first_batch_read_from_a_cold_disk(here: Here) -> None:
    """The first sample takes seconds, and one rank two more than the others."""

    class Cold(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE * here.world_size

        def __getitem__(self, index: int) -> torch.Tensor:
            if index < here.world_size:
                time.sleep(3.0 if here.is_last else 1.0)
            return torch.full((8,), index / 100)

    here.fit(data=in_order(here, Cold()), max_epochs=1)


@quiet("https://github.com/Sllambias/yucca/issues/17")
def model_that_is_compiled(here: Here) -> None:
    """The layers are compiled when they are first called, on each rank."""

    class Compiled(Net):
        def configure_model(self) -> None:
            super().configure_model()
            self.fast = torch.compile(self.layers, backend="eager")

        def loss(self, batch: Any) -> torch.Tensor:
            return self.fast(first_tensor(batch)).square().mean()

    here.fit(net=Compiled(here))


@quiet("https://github.com/Lightning-AI/pytorch-lightning/issues/9611", world_size=3, moment=Moment.CHECKPOINT)
def checkpoint_that_takes_its_time(here: Here) -> None:
    """Rank 0 writes for three seconds, and the others wait for it where Lightning lets them."""

    class Heavy(L.Callback):
        def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: Any) -> None:
            if trainer.is_global_zero:
                time.sleep(3.0)

    callbacks = [Heavy(), ModelCheckpoint(here.folder / "saved")]
    here.fit(callbacks=callbacks, enable_checkpointing=True)


@quiet("https://github.com/karpathy/nanochat/issues/371", world_size=3)
def shards_read_round_and_round(here: Here) -> None:
    """A stream without end, of a number of shards that is no multiple of the ranks, and an epoch of so many batches."""

    class Shards(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            shards = range(here.rank, 5, here.world_size)
            while True:
                for shard in shards:
                    yield from (torch.full((8,), shard + row / 100) for row in range(10))

    here.fit(data=DataLoader(Shards(), batch_size=BATCH_SIZE), limit_train_batches=BATCHES)


@quiet("https://github.com/modelscope/FunASR/pull/3472", world_size=3)
def gradients_exchanged_in_every_third_step(here: Here) -> None:
    """Gradients of three batches are added up by hand, and exchanged with those of the third."""

    class Accumulating(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            is_last = (batch_idx + 1) % 3 == 0
            with optimizer.toggle_model(sync_grad=is_last):
                self.manual_backward(self.loss(batch))
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    here.fit(net=Accumulating(here))


@quiet("https://github.com/pytorch/torchtitan/issues/1618", world_size=3)
def garbage_collected_now_here_now_there(here: Here) -> None:
    """Each rank collects its garbage when it likes, which takes a moment."""

    class Collecting(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % here.world_size == here.rank:
                self.garbage = [[number] for number in range(200_000)]
                gc.collect()

    here.fit(callbacks=[Collecting()])


@quiet("https://github.com/ultralytics/ultralytics/issues/1439", world_size=3)
def rank_that_is_slower_in_every_step(here: Here) -> None:
    """The last rank needs half a second more for each step, so the others wait half a second in each."""

    class Slower(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if here.is_last:
                time.sleep(0.5)
            return super().training_step(batch, batch_idx)

    here.fit(net=Slower(here))


@quiet("https://github.com/snowflakedb/ArcticTraining/issues/219")
def tracker_that_lets_through_two_lines_a_second(here: Here) -> None:
    """The tracker is limited to so many lines a second, and lets rank 0 wait for its turn."""

    class Limited(Logger):
        name = "limited"
        version = 0

        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            time.sleep(0.5)

        def log_hyperparams(self, *args: Any, **keywords: Any) -> None:
            pass

    here.fit(net=LoggingNet(here), logger=Limited())


@quiet("https://github.com/huggingface/picotron/pull/5", world_size=4)
def pairs_that_exchange_each_at_its_own_pace(here: Here) -> None:
    """Pairs of ranks exchange among themselves before all of them do, and one pair is a second slower."""

    class Paired(Net):
        def on_fit_start(self) -> None:
            self.pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if here.rank == 3 and batch_idx == 2:
                time.sleep(1.0)
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=self.pairs[here.rank // 2])
            return loss + mean

    here.fit(net=Paired(here))


@quiet("https://github.com/meta-pytorch/tnt/pull/189", world_size=3, moment=Moment.VALIDATION)
def stopping_early_by_a_value_of_all_ranks(here: Here) -> None:
    """The value that ends the training is the mean of all ranks, so all end in the same epoch."""

    class Worse(MeetingNet):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("worse", float(here.rank + self.current_epoch), sync_dist=True)

    here.fit(net=Worse(here), callbacks=[EarlyStopping("worse", patience=1)], max_epochs=8)


def report_of(folder: Path) -> None:
    program = "import pathlib, sys, time; time.sleep(1.5); pathlib.Path(sys.argv[1]).write_text('done')"
    subprocess.run([sys.executable, "-c", program, str(folder / "report.txt")], check=True)


@quiet("https://github.com/princeton-nlp/HELMET/issues/21", world_size=3, moment=Moment.EPOCH_END)
def objects_of_all_sizes_and_a_report(here: Here) -> None:
    """All ranks gather lists of unequal length, and rank 0 lets a program write a report of them."""

    class Reporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            parts: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(parts, ["line"] * (here.rank * 1000))
            if trainer.is_global_zero:
                report_of(here.folder)

    here.fit(callbacks=[Reporting()])
