"""A rank that fails, or dies."""

import ctypes
import os
import signal
import sys

import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from samples import in_order
from torch.utils.data import Dataset
from training import BATCH_SIZE, Here, Net
from truths import Moment, fault

EVERYWHERE = {Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3, 4), Moment.EPOCH_END: (3,), Moment.VALIDATION: (2,)}


@fault("failed-rank", ranks=(1,), at=EVERYWHERE | {Moment.START: (2,)}, whose="code")
def exception_in_a_hook(here: Here) -> None:
    def read(net: Net) -> None:
        if here.is_hit:
            here.begins()
            raise KeyError("label")  # <- here

    here.fit(read)


@fault("failed-rank", ranks=(0,), at={Moment.MIDDLE: (2, 3)}, whose="code")
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


@fault("failed-rank", ranks=(-1,), at={Moment.MIDDLE: (2, 3)}, whose="code")
def exception_in_a_loader_worker(here: Here) -> None:
    here.fit(data=in_order(here, BrokenSample(here), num_workers=1))


@fault("failed-rank", ranks=(-1,), at={Moment.MIDDLE: (2,), Moment.EPOCH_END: (3,)}, whose="code")
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


@fault("dead-rank", ranks=(-1,), at=EVERYWHERE, has_line=False, has_phase=False, whose="machine")
def killed_process(here: Here) -> None:
    def die(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os.kill(os.getpid(), signal.SIGKILL)

    here.fit(die)


@fault("dead-rank", ranks=(0,), at={Moment.MIDDLE: (2, 3)}, has_line=False, has_phase=False, whose="machine")
def killed_rank_zero(here: Here) -> None:
    """With it goes the job's store."""

    def die(net: Net) -> None:
        if here.is_hit:
            here.begins()
            os.kill(os.getpid(), signal.SIGKILL)

    here.fit(die)


@fault("dead-rank", ranks=(1,), at={Moment.MIDDLE: (2,)}, has_line=False, has_phase=False, whose="code")
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


@fault("failed-rank", ranks=(1,), at={Moment.MIDDLE: (2, 3)}, whose="code")
def exception_after_which_a_checkpoint_is_saved(here: Here) -> None:
    """By the rank that has failed alone, with a barrier at the end; its exception is never printed."""

    def read(net: Net) -> None:
        if here.is_hit:
            here.begins()
            raise IndexError("list index out of range")  # <- here

    here.fit(read, callbacks=[OnExceptionCheckpoint(here.folder)], enable_checkpointing=True)
