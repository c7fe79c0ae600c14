"""A rank fails, dies, or stands still as a whole."""

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from faults_data import in_order
from torch.utils.data import Dataset
from training import BATCH_SIZE, FOR_LONG_S, IN_THE_MIDDLE, Here, Net, rows
from truths import Moment, fault

EVERYWHERE = {Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3, 4), Moment.EPOCH_END: (3,), Moment.VALIDATION: (2,)}


@fault("failed-rank", ranks=(1,), at=EVERYWHERE | {Moment.START: (2,)})
def exception_in_a_hook(here: Here) -> None:
    def read(net: Net) -> None:
        if here.is_hit:
            here.begins()
            raise KeyError("label")  # <- here

    here.fit(read)


@fault("failed-rank", ranks=(0,), at={Moment.MIDDLE: (2, 3)})
def exception_on_rank_zero(here: Here) -> None:
    def read(net: Net) -> None:
        if here.is_hit:
            here.begins()
            torch.zeros(2) @ torch.zeros(3)  # <- here

    here.fit(read)


class BrokenSample(Dataset[torch.Tensor]):
    """One rank's share has a sample that cannot be read."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 6 * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        # The share of the last rank, without shuffling.
        if index == 2 * BATCH_SIZE * self.here.world_size + self.here.world_size - 1:
            self.here.begins()
            raise ValueError("truncated file")  # <- exception_in_a_loader_worker
        return torch.full((8,), index / 100)


@fault("failed-rank", ranks=(-1,), at={Moment.MIDDLE: (2, 3)})
def exception_in_a_loader_worker(here: Here) -> None:
    here.fit(data=in_order(here, BrokenSample(here), num_workers=1))


@fault("failed-rank", ranks=(-1,), at={Moment.MIDDLE: (2,), Moment.EPOCH_END: (3,)})
def silent_exit(here: Here) -> None:
    def leave(net: Net) -> None:
        if here.is_hit:
            here.begins()
            sys.exit(0)  # <- here

    here.fit(leave)


@fault("gpu-memory-exhausted", ranks=(1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (3,)})
def no_memory_left_on_a_device(here: Here) -> None:
    """What CUDA's allocator raises, word for word, where there is no GPU."""

    def forward(net: Net) -> None:
        if here.is_hit:
            here.begins()
            raise torch.OutOfMemoryError(  # <- here
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB of which "
                "1.12 GiB is free. Process 4711 has 78.02 GiB memory in use. Of the allocated memory 75.31 GiB is "
                "allocated by PyTorch, and 1.93 GiB is reserved by PyTorch but unallocated."
            )

    here.fit(forward)


@fault("dead-rank", ranks=(-1,), at=EVERYWHERE, has_line=False, has_phase=False)
def killed_process(here: Here) -> None:
    def die(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os.kill(os.getpid(), signal.SIGKILL)

    here.fit(die)


@fault("dead-rank", ranks=(0,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False)
def killed_rank_zero(here: Here) -> None:
    """With it goes the job's store."""

    def die(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os.kill(os.getpid(), signal.SIGKILL)

    here.fit(die)


@fault("dead-rank", ranks=(1,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False)
def segmentation_fault(here: Here) -> None:
    def crash(net: Net) -> None:
        if here.is_hit:
            here.begins()
            ctypes.string_at(0)

    here.fit(crash)


@fault("dead-rank", ranks=(1,), at={Moment.MIDDLE: (2,), Moment.START: (3,)}, has_line=False, has_phase=False)
def exit_without_a_word(here: Here) -> None:
    def leave(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os._exit(3)

    here.fit(leave)


@fault("stopped-process", ranks=(-1,), at={Moment.MIDDLE: (2, 3), Moment.VALIDATION: (2,)}, has_line=False)
def stopped_by_a_signal(here: Here) -> None:
    def stop(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os.kill(os.getpid(), signal.SIGSTOP)

    here.fit(stop, data=(rows(here), rows(here)), net=MeetingNet(here))


class MeetingNet(Net):
    """All ranks meet in validation, too."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_loss", self.loss(batch), sync_dist=True)


@fault("stopped-process", ranks=(0,), at={Moment.MIDDLE: (2,)}, has_line=False)
def stopped_rank_zero(here: Here) -> None:
    stopped_by_a_signal(here)


@fault("gil-held", ranks=(1,), at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (3,)})
def loop_in_native_code(here: Here) -> None:
    def count(net: Net) -> None:
        if here.is_hit:
            here.begins()
            sum(itertools.repeat(1, 10**12))  # <- here

    here.fit(count)


@fault("gil-held", ranks=(1,), at={Moment.MIDDLE: (2,)})
def native_call_that_sleeps_with_the_gil(here: Here) -> None:
    """In a read, which signals do not end: from a device, say, that does not answer."""
    read, (pipe, _) = ctypes.PyDLL(None).read, os.pipe()

    def call(net: Net) -> None:
        if here.is_hit:
            here.begins()
            read(pipe, ctypes.create_string_buffer(1), 1)  # <- here

    here.fit(call)


@fault("blocked-on-disk", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False)
def uninterruptible_sleep(here: Here) -> None:
    """As of a storage that hangs: the kernel's state D, from which no signal wakes.

    The parent of a ``vfork`` is in it until its child has started a program, which here waits for a pipe first.
    """
    pipe = here.folder / f"pipe-{here.rank}"
    os.mkfifo(pipe)

    def read(net: Net) -> None:
        if here.is_hit:
            here.begins()
            actions = [(os.POSIX_SPAWN_OPEN, 0, str(pipe), os.O_RDONLY, 0)]
            os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=actions)

    here.fit(read)


@fault("blocked-on-disk", ranks=(1,), at={Moment.MIDDLE: (2,)})
def file_that_does_not_answer(here: Here) -> None:
    """A cache on storage that has stopped answering: nobody writes into this pipe."""
    cache = here.folder / f"features-{here.rank}.bin"
    os.mkfifo(cache)
    holder = threading.Thread(target=hold, args=(cache,), daemon=True)

    def read(net: Net) -> None:
        if here.is_hit:
            holder.start()
            here.begins()
            cache.read_bytes()  # <- here

    here.fit(read)


def hold(pipe: Any) -> None:
    with pipe.open("wb"):
        time.sleep(FOR_LONG_S)


@fault("gc-pause", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, has_line=False)
def finalizers_in_a_garbage_collection(here: Here) -> None:
    """Objects in a cycle, which close what they hold when they are collected: the collection lasts as long."""

    class Handle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)

    def collect(net: Net) -> None:
        import gc

        if here.is_hit and net.global_step == IN_THE_MIDDLE:
            Handle()
            gc.collect()

    here.fit(collect)


@fault("gc-pause", ranks=(1,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False)
def huge_graph_of_objects(here: Here) -> None:
    """Collections of some millions of objects, again and again, each with the global interpreter lock held."""

    def collect(net: Net) -> None:
        import gc

        if here.is_hit:
            here.begins()
            end = time.monotonic() + FOR_LONG_S
            while time.monotonic() < end:
                gc.collect()

    kept = [[] for _ in range(12_000_000)] if here.is_hit else []
    here.fit(collect)
    del kept
