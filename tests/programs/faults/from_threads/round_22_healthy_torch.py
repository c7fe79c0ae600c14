"""Round 22 after public threads: plain PyTorch that saves, measures, uploads, and reads in its own way, and is fine."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from torch.utils.data import DataLoader, Dataset
from training import BATCH_SIZE, BATCHES, Here, Net
from truths import Moment


class InBackground(L.Callback):
    """Saves in a thread, which has a group of its own for what ranks tell one another meanwhile."""

    def __init__(self, here: Here, every: int) -> None:
        self.here, self.every = here, every
        self.thread: threading.Thread | None = None

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.group = dist.new_group()

    def save(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        plans: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(plans, (self.here.rank, sorted(weights)), group=self.group)
        time.sleep(0.4 * (1 + self.here.rank))
        torch.save(weights, self.here.folder / f"step-{step}-{self.here.rank}.pt")
        dist.barrier(group=self.group)

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % self.every:
            return
        self.join()
        weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        self.thread = threading.Thread(target=self.save, args=(trainer.global_step, weights))
        self.thread.start()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.join()


@quiet("https://github.com/InternLM/xtuner/pull/1703", world_size=3)
def checkpoint_in_a_thread_with_its_own_group(here: Here) -> None:
    """Threads gather and wait for one another in their own group while training goes on in the other."""
    here.fit(callbacks=[InBackground(here, every=3)])


class Measured(Net):
    """Reduces how long steps take, the longest of all ranks, every few of them."""

    def on_fit_start(self) -> None:
        self.seconds: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        start = time.monotonic()
        time.sleep(0.7 if batch_idx % self.here.world_size == self.here.rank else 0.02)
        self.seconds.append(time.monotonic() - start)
        return super().training_step(batch, batch_idx)

    def longest(self) -> Iterator[float]:
        for reduction in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
            seconds = torch.tensor(self.seconds).sum()
            dist.all_reduce(seconds, op=reduction)
            yield float(seconds)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % 2 == 0:
            longest, total = self.longest()
            self.seconds.clear()
            if self.trainer.is_global_zero:
                (self.here.folder / "seconds").write_text(f"{longest} {total}")


@quiet("https://github.com/huggingface/lerobot/pull/3773", world_size=4)
def step_times_of_which_the_longest_is_logged(here: Here) -> None:
    """In each step another rank is slow; all take part in both reductions, and only the first one writes a file."""
    here.fit(net=Measured(here))


class Uploads(L.Callback):
    """The first rank uploads weights in threads, and tries again what has failed, before it is done."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.failed: list[int] = []
        self.threads: list[threading.Thread] = []

    def upload(self, step: int, is_again: bool = False) -> None:
        time.sleep(0.3)
        if step == 12 and not is_again:
            raise ConnectionResetError("the bucket is busy")
        (self.here.folder / f"uploaded-{step}").touch()

    def try_to_upload(self, step: int) -> None:
        try:
            self.upload(step)
        except ConnectionResetError:
            self.failed.append(step)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.threads.append(threading.Thread(target=self.try_to_upload, args=(trainer.global_step,)))
            self.threads[-1].start()

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for thread in self.threads:
            thread.join(10)
        for step in self.failed:
            time.sleep(1.0)
            self.upload(step, is_again=True)


@quiet("https://github.com/Roblox/FAI-RL/pull/76", moment=Moment.END)
def upload_that_is_tried_again_after_the_last_epoch(here: Here) -> None:
    """The last upload fails, and the first rank makes up for that in a second or two; the other one has ended."""
    here.fit(callbacks=[Uploads(here)])


class Crowded(Dataset[torch.Tensor]):
    """Rows that are computed from many numbers."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(300_000, generator=torch.Generator().manual_seed(index)).sort().values[:8]


def on_all_cores(worker: int) -> None:
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class Pinned(L.Callback):
    """A library binds each process that imports it to a single core."""

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        on_all_cores(trainer.global_rank)


@quiet("https://github.com/pytorch/pytorch/issues/101850")
def cores_given_back_to_those_that_read(here: Here) -> None:
    """All ranks are bound to one core by a library; they and their workers take all others back, and read on."""
    data = DataLoader(Crowded(here), BATCH_SIZE, num_workers=1, worker_init_fn=on_all_cores)
    here.fit(data=data, callbacks=[Pinned()])


class Resumed(L.Callback):
    """Goes on where the first rank has left off: that rank knows whether it has, and tells all others."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.path = here.folder / f"scratch-{here.rank}" / "state.pt"
        self.path.parent.mkdir()
        if here.rank == 0:
            torch.save({"seen": 24}, self.path)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        found = torch.tensor(int(self.path.exists()))
        dist.broadcast(found, src=0)
        if not found:
            return
        state = [self.read() if trainer.is_global_zero else None]
        dist.broadcast_object_list(state, src=0)
        (self.here.folder / f"seen-{trainer.global_rank}").write_text(f"{state[0]}")

    def read(self) -> Any:
        time.sleep(1.5)
        return torch.load(self.path)


@quiet("https://github.com/KempnerInstitute/KempnerForge/pull/50", world_size=3, moment=Moment.START)
def state_that_only_the_first_rank_can_see(here: Here) -> None:
    """The file is on the first host only; its rank says that there is one, and reads it for all others."""
    here.fit(callbacks=[Resumed(here)])
