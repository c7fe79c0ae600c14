"""Round 19 after public threads: what users of sharded models do that looks odd, and is as it should be."""

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from filelock import FileLock
from from_threads.round_13_sharded import SPLIT
from training import Here, Net, first_tensor
from truths import Moment, healthy


class Shards(L.Callback):
    """Each rank writes its shard, for as long as its volume takes, and waits in a group with a limit of its own."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        weights: dict[str, Any] = dict(module.named_parameters())
        for name, weight in weights.items():
            time.sleep(0.1 * trainer.global_rank)
            torch.save(weight.detach().to_local(), self.here.folder / f"{name}-{trainer.global_rank}.pt")
        dist.barrier(group=self.group)


@healthy({Moment.EPOCH_END: (4,)}, source="https://github.com/ByteDance-Seed/VeOmni/pull/492", strategies=SPLIT)
def shards_written_at_the_pace_of_each_volume(here: Here) -> None:
    """All ranks wait in a group of their own for the rank whose volume is the slowest."""
    here.fit(callbacks=[Shards(here)])


class Beside(L.Callback):
    """A thread of each rank agrees on what it saves, while the main threads meet in a group of their own."""

    def agree(self, rank: int) -> None:
        for step in range(10):
            time.sleep(0.1 + 0.1 * (rank == step % 2))
            dist.all_reduce(torch.tensor(step), group=self.of_threads)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.of_threads, self.of_embeddings = dist.new_group(), dist.new_group(backend="gloo")
        self.saving = threading.Thread(target=self.agree, args=(trainer.global_rank,))
        self.saving.start()

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        dist.monitored_barrier(group=self.of_embeddings)

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.saving.join()


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/Tencent-Hunyuan/UniRL/pull/410", strategies=SPLIT)
def barriers_beside_a_thread_that_agrees(here: Here) -> None:
    """Threads and main threads of all ranks communicate at the same time, each in a group of their own."""
    here.fit(callbacks=[Beside()])


@healthy({Moment.FIRST_STEP: (3,)}, source="https://github.com/pytorch/PiPPy/issues/969", strategies=SPLIT)
def connection_that_skips_a_slow_stage(here: Here) -> None:
    """The last stage receives from the first one and from the second one, which takes its time, and waits for both."""

    class Skipping(Net):
        def handed_on(self, rows: torch.Tensor) -> torch.Tensor:
            if self.global_rank == 0:
                requests = [dist.isend(rows, other) for other in (1, 2)]
            elif self.global_rank == 1:
                dist.recv(rows, 0)
                time.sleep(1.0)
                requests = [dist.isend(rows, 2)]
            else:
                before = torch.empty_like(rows)
                requests = [dist.irecv(before, 0), dist.irecv(rows, 1)]
            for request in requests:
                assert request
                request.wait()
            return rows

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(self.handed_on(first_tensor(batch).contiguous()))

    here.fit(net=Skipping(here), max_epochs=1)


class Collected(L.Callback):
    """Collects garbage with every third step on all ranks, which wait for one another before and after."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        gc.disable()
        self.metadata = [{"name": [str(number)]} for number in range(100_000 * (1 + 4 * trainer.global_rank))]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            trainer.strategy.barrier("before")
            gc.collect()
            trainer.strategy.barrier("after")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        gc.enable()


@healthy({Moment.MIDDLE: (2,)}, source="https://github.com/marin-community/marin/pull/9224", strategies=SPLIT)
def garbage_that_all_ranks_collect_together(here: Here) -> None:
    """One rank has more to look through, and the other waits for it at a barrier."""
    here.fit(callbacks=[Collected()])


@healthy({Moment.START: (4,)}, source="https://github.com/modelscope/ms-swift/issues/8269", strategies=SPLIT)
def cache_that_ranks_fill_one_after_the_other(here: Here) -> None:
    """Each rank adds to the same cache under a lock, and holds it for as long as it takes, one after the other."""

    class Filling(L.Callback):
        def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
            with FileLock(here.folder / "cache.lock"):
                time.sleep(0.4)
                with (here.folder / "cache").open("a") as file:
                    file.write(f"{here.rank}\n")

    here.fit(callbacks=[Filling()])
