"""Round 13 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import json
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, Net, first_tensor
from truths import Moment


@quiet("https://github.com/speechbrain/speechbrain/pull/2192", world_size=3, moment=Moment.CHECKPOINT)
def checkpoint_when_the_clock_of_the_first_rank_says_so(here: Here) -> None:
    """The first rank looks at its clock after each batch and tells all, who save together, and it takes a second."""

    class Slow(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.2)
            return super().training_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            time.sleep(1.0 if here.rank == 0 else 0.1)

    class Clocked(L.Callback):
        saved_s = time.monotonic()

        def is_due(self) -> bool:
            said = [time.monotonic() - self.saved_s > 1.0 if here.rank == 0 else None]
            dist.broadcast_object_list(said, src=0)
            return bool(said[0])

        def on_train_batch_end(self, trainer: L.Trainer, *of: Any) -> None:
            if self.is_due():
                trainer.save_checkpoint(here.folder / f"step_{trainer.global_step}.ckpt")
                self.saved_s = time.monotonic()

    here.fit(net=Slow(here), callbacks=[Clocked()])


@quiet("https://github.com/meta-pytorch/torchtune/issues/885", world_size=2)
def trace_of_the_first_rank_written_in_a_second(here: Here) -> None:
    """The first rank alone is traced, and the others wait while it writes what there was."""

    class Traced(L.Callback):
        profiler: Any = None

        def write(self, profiler: Any) -> None:
            events = [[event.name, event.cpu_time_total] for event in profiler.events()]
            time.sleep(1.5)
            (here.folder / "trace.json").write_text(json.dumps(events))

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.global_rank == 0:
                self.profiler = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU],
                    schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2),
                    on_trace_ready=self.write,
                )
                self.profiler.start()

        def on_train_batch_end(self, *of: Any) -> None:
            if self.profiler is not None:
                self.profiler.step()

        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if self.profiler is not None:
                self.profiler.stop()

    here.fit(callbacks=[Traced()])


@quiet("https://github.com/ultralytics/yolov5/pull/8345", world_size=3, moment=Moment.EPOCH_END)
def end_that_the_first_rank_announces(here: Here) -> None:
    """The first rank validates alone, and ends the training of all after the third of twenty epochs."""

    class Patience(L.Callback):
        fitness = 0.0
        without_gain = 0

        def validate(self, module: Any) -> float:
            with torch.no_grad():
                losses = []
                for number in range(5):
                    time.sleep(0.25)
                    losses.append(float(module.layers(torch.full((4, 8), number / 5)).square().mean()))
            return min(1.0, 100 * sum(losses))

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            ends = [False]
            if trainer.is_global_zero:
                fitness = self.validate(module)
                self.without_gain = 0 if fitness > self.fitness else self.without_gain + 1
                self.fitness = max(fitness, self.fitness)
                ends = [self.without_gain >= 2 or trainer.current_epoch >= 2]
            dist.broadcast_object_list(ends, src=0)
            trainer.should_stop = trainer.should_stop or ends[0]

    here.fit(callbacks=[Patience()], max_epochs=20)


class Agreed:
    """Reads one batch ahead, and ends as soon as any rank has nothing more; a group of its own is for asking that."""

    def __init__(self, here: Here, batches: int) -> None:
        self.here = here
        self.loader = DataLoader(TensorDataset(torch.rand(batches * BATCH_SIZE, 8)), BATCH_SIZE)
        self.group: Any = None

    def all_have_one(self, batch: Any) -> bool:
        count = torch.tensor([0 if batch is None else 1], dtype=torch.int32)
        dist.all_reduce(count, dist.ReduceOp.MIN, group=self.group)
        return bool(count)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.group = self.group or dist.new_group(backend="gloo")
        batches = iter(self.loader)
        batch = next(batches, None)
        while self.all_have_one(batch):
            following = next(batches, None)
            time.sleep(0.1 * self.here.rank)
            yield first_tensor(batch)
            batch = following


@quiet("https://github.com/meta-pytorch/torchrec/pull/4158", world_size=3, moment=Moment.EPOCH_END)
def batches_of_which_all_ranks_have_one_more(here: Here) -> None:
    """Ranks have eight, seven and six batches, read them at their own pace, and agree on when to end an epoch."""
    here.fit(net=Net(here), data=Agreed(here, BATCHES + 2 - here.rank))
