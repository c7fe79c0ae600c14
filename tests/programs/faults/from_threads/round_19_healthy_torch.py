"""Round 19 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import gc
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from torch.utils.file_baton import FileBaton
from training import Here, Net
from truths import Moment


def mesh(number: int) -> int:
    return int(subprocess.check_output(["sh", "-c", f"sleep 0.2; echo {number}"]))


class Meshes(L.Callback):
    """Makes meshes with programs, each of which ends when it has made one."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == self.here.rank:
            with ThreadPoolExecutor(2) as pool:
                meshes = [*pool.map(mesh, range(6 + 2 * self.here.rank))]
            (self.here.folder / f"meshes-{self.here.rank}").write_text(" ".join(map(str, meshes)))


@quiet("https://github.com/seung-lab/cloud-volume/issues/103", world_size=3)
def programs_that_end_after_a_mesh(here: Here) -> None:
    """Now this rank waits for its programs and now that one; they end all the time, as they should."""
    here.fit(callbacks=[Meshes(here)])


class Built(Net):
    """All ranks need a kernel; one of them builds it, and the others wait until its lock is gone."""

    def on_validation_start(self) -> None:
        baton = FileBaton(str(self.here.folder / "lock"))
        kernel = self.here.folder / "kernel.py"
        if kernel.exists():
            return
        if baton.try_acquire():
            try:
                time.sleep(1.5)
                kernel.write_text("scale = 2")
            finally:
                baton.release()
        else:
            baton.wait()


@quiet("https://github.com/pytorch/pytorch/pull/149382", world_size=3, moment=Moment.VALIDATION)
def lock_released_after_a_build(here: Here) -> None:
    """Two ranks wait for the lock of the third, which builds for a second and a half."""
    here.fit(net=Built(here))


class Collected(L.Callback):
    """Garbage is collected when all ranks are told to, and never in between; one rank has much more of it."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.kept: list[list[int]] = []

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.kept = [[number] for number in range(400_000 * self.here.rank)]
        gc.disable()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            gc.collect()

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        gc.enable()


@quiet("https://github.com/PrimeIntellect-ai/prime-rl/pull/2145", world_size=3)
def garbage_collected_by_all_ranks_at_once(here: Here) -> None:
    """Python collects garbage in every other step, for longer the higher the rank's number."""
    here.fit(callbacks=[Collected(here)])


class Monitored(Net):
    """All ranks tell the first one after each step that they are there; each step takes another rank longest."""

    def on_fit_start(self) -> None:
        self.monitors = dist.new_group(backend="gloo")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.3 * ((batch_idx + self.here.rank) % self.here.world_size))
        dist.monitored_barrier(self.monitors, timeout=timedelta(seconds=20), wait_all_ranks=True)
        return super().training_step(batch, batch_idx)


@quiet("https://github.com/pytorch/pytorch/pull/53773", world_size=3)
def ranks_that_are_asked_whether_they_are_there(here: Here) -> None:
    """A barrier with a time limit of its own in each step, which a different rank reaches last, and in good time."""
    here.fit(net=Monitored(here))


class Pairs(Net):
    """Ranks average within pairs, and only those of a pair make its group."""

    def on_fit_start(self) -> None:
        self.first = self.here.rank // 2 * 2
        ranks = [rank for rank in (self.first, self.first + 1) if rank < self.here.world_size]
        self.pair = dist.new_group(ranks, use_local_synchronization=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.2 * self.first)
        mean = self.layers(batch[0]).detach().mean(0)
        dist.all_reduce(mean, group=self.pair)
        return super().training_step(batch, batch_idx)


@quiet("https://github.com/pytorch/pytorch/pull/100518", world_size=4)
def groups_made_by_their_members_alone(here: Here) -> None:
    """Each rank makes the group of its pair and no other one, which PyTorch permits if it is told so."""
    here.fit(net=Pairs(here))
