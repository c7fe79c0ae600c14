"""Hangs of trainings that know nothing of this package, for any framework, each with its truth.

A framework calls `step` before every batch is trained on, `run` around its loop, and `end` after it.
"""

import atexit
import fcntl
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

BATCHES, BATCH_SIZE = 8, 4
IN_THE_MIDDLE = 5
FOR_LONG_S = 600.0
HANGS: dict[str, type["Hang"]] = {}
"""All of them, by name."""


@dataclass
class Here:
    """What a hang knows of the rank that it runs on.

    Attributes:
        folder: For what it leaves behind.
        metrics: A process group besides the default one, made as soon as that is there.
    """

    folder: Path
    metrics: Any = None
    store: Any = None
    kept: list[Any] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def is_hit(self, rank: int, batch_idx: int) -> bool:
        """Whether it goes wrong now, on this rank; a real program has no condition on the rank there."""
        return self.rank == rank and batch_idx == IN_THE_MIDDLE

    def begins(self) -> None:
        """From now on it hangs."""
        (self.folder / f"began-{self.rank}").write_text(str(time.time()))


class Rows(Dataset[torch.Tensor]):
    """Some rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


class Hang:
    """One that does not hang at all; the truth about the others is in their attributes.

    Attributes:
        causes: Names of the cause; several where more than one of them is true.
        ranks: The ranks that cause it.
        has_line: Whether a line is to blame; it is marked.
    """

    causes: ClassVar[tuple[str, ...]] = ()
    ranks: ClassVar[tuple[int, ...]] = ()
    has_line: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        HANGS[cls.__name__] = cls

    def loader(self, here: Here) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(BATCHES * BATCH_SIZE), batch_size=BATCH_SIZE)

    def begin(self, here: Here) -> None:
        """Before the first batch, once there are process groups."""

    def step(self, here: Here, batch_idx: int) -> None:
        """Before each batch."""

    def run(self, here: Here, train: Callable[[], None]) -> None:
        train()

    def end(self, here: Here) -> None:
        """After the last batch."""


class Healthy(Hang):
    """Every step takes its time, and that is all."""

    def loader(self, here: Here) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(10_000 * BATCH_SIZE), batch_size=BATCH_SIZE)

    def step(self, here: Here, batch_idx: int) -> None:
        here.begins()
        time.sleep(0.5)


class CollectiveUnderACondition(Hang):
    """A metric is reduced where rank 0 logs it."""

    causes = ("diverged-collectives", "rank-zero-only-work")
    ranks = (0,)

    def step(self, here: Here, batch_idx: int) -> None:
        if here.rank == 0 and batch_idx == IN_THE_MIDDLE:
            here.begins()
            dist.all_reduce(torch.ones(1), group=here.metrics)  # <- here


class FailedBeforeAFinally(Hang):
    """Rank 1 raises, and then waits for the thread that writes its results, which waits for more of them."""

    causes = ("failed-rank",)
    ranks = (1,)

    def step(self, here: Here, batch_idx: int) -> None:
        if here.is_hit(1, batch_idx):
            here.begins()
            raise ValueError("label 17 is not among the 10 classes")  # <- here

    def run(self, here: Here, train: Callable[[], None]) -> None:
        results: queue.Queue[str] = queue.Queue()
        writer = threading.Thread(target=results.get, daemon=True)
        writer.start()
        try:
            train()
        finally:
            writer.join()


class FailedBeforeAnExitHook(Hang):
    """Rank 1's exception has left its program, at whose end all ranks are to meet."""

    causes = ("failed-rank",)
    ranks = (1,)

    def begin(self, here: Here) -> None:
        def meet() -> None:
            dist.barrier(group=here.metrics)

        atexit.register(meet)

    def step(self, here: Here, batch_idx: int) -> None:
        if here.is_hit(1, batch_idx):
            here.begins()
            raise KeyError("caption")  # <- here


class StallingRows(Rows):
    """Rows, one of which a worker cannot read."""

    def __init__(self, count: int, here: Here) -> None:
        super().__init__(count)
        self.here = here
        self.pipe = here.folder / f"rows-{here.rank}"

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.here.rank == 1 and index == IN_THE_MIDDLE * BATCH_SIZE:
            os.mkfifo(self.pipe)
            self.here.begins()
            self.pipe.read_bytes()  # <- StallingLoader
        return super().__getitem__(index)


class StallingLoader(Hang):
    """A worker of rank 1 reads what does not come."""

    causes = ("data-stall",)
    ranks = (1,)

    def loader(self, here: Here) -> DataLoader[torch.Tensor]:
        return DataLoader(StallingRows(BATCHES * BATCH_SIZE, here), batch_size=BATCH_SIZE, num_workers=1)


class SendWithoutReceive(Hang):
    """Rank 0 sends its activations every few batches; rank 1 counts these from 1."""

    causes = ("unmatched-p2p", "p2p-blocked", "diverged-collectives")
    ranks = (0,)

    def step(self, here: Here, batch_idx: int) -> None:
        activations = torch.ones(1_000_000)
        if here.rank == 0 and batch_idx % 4 == 3:
            here.begins()
            dist.send(activations, dst=1)  # <- here
        if here.rank == 1 and (batch_idx + 1) % 4 == 3 and batch_idx > 3:
            dist.recv(activations, src=0)


class LockHeldByAThread(Hang):
    """A thread of rank 2 uploads while it holds the lock of what is to be uploaded, and its server says nothing."""

    causes = ("rank-behind",)
    ranks = (2,)

    def begin(self, here: Here) -> None:
        self.lock, self.taken = threading.Lock(), threading.Event()
        self.ours, self.servers = socket.socketpair()

    def upload(self) -> None:
        with self.lock:
            self.ours.sendall(b"checkpoint")
            self.taken.set()
            self.ours.recv(1)

    def step(self, here: Here, batch_idx: int) -> None:
        if here.is_hit(2, batch_idx):
            threading.Thread(target=self.upload, daemon=True).start()
            self.taken.wait()
            here.begins()
        with self.lock:  # <- here
            here.kept.append(batch_idx)


class FileLockHeldByARank(Hang):
    """Every rank takes the cache's lock for a moment; rank 0 keeps it."""

    causes = ("file-lock",)
    ranks = (1,)

    def step(self, here: Here, batch_idx: int) -> None:
        file = (here.folder / "cache.lock").open("w")
        taken = here.folder / "taken"
        while here.is_hit(1, batch_idx) and not taken.exists():
            time.sleep(0.05)
        if here.is_hit(1, batch_idx):
            here.begins()
        if here.rank < 2:
            fcntl.flock(file, fcntl.LOCK_EX)  # <- here
        if here.is_hit(0, batch_idx):
            here.kept.append(file)
            taken.touch()
        else:
            file.close()


class DeadPeer(Hang):
    """The last rank is killed, as for its memory, before it says that it is ready; the others wait for that."""

    causes = ("dead-rank",)
    ranks = (2,)
    has_line = False

    def step(self, here: Here, batch_idx: int) -> None:
        if batch_idx != IN_THE_MIDDLE:
            return
        if here.rank == 2:
            here.begins()
            os.kill(os.getpid(), signal.SIGKILL)
        here.store.wait(["ready-2"])


class FewerBatches(Hang):
    """Rank 1's part of the data is shorter; who has reached its end goes on to the evaluation."""

    causes = ("uneven-batches",)
    ranks = (1,)
    has_line = False

    def loader(self, here: Here) -> DataLoader[torch.Tensor]:
        batches = BATCHES - 2 * (here.rank == 1)
        return DataLoader(Rows(batches * BATCH_SIZE), batch_size=BATCH_SIZE)

    def end(self, here: Here) -> None:
        here.begins()
        dist.all_reduce(torch.ones(1), group=here.metrics)


class EvaluationOnRankZero(Hang):
    """Rank 0 evaluates alone, in steps of its own."""

    causes = ("rank-zero-only-work",)
    ranks = (0,)

    def evaluate(self, here: Here) -> None:
        here.begins()
        for image in range(10_000):
            here.kept.append(image)
            time.sleep(0.3)  # <- here

    def step(self, here: Here, batch_idx: int) -> None:
        if here.rank == 0 and batch_idx == IN_THE_MIDDLE:
            self.evaluate(here)
