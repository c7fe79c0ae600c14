"""Workers end at the worst instants: nobody waits for batches that nobody makes, or for locks of the dead."""

import fcntl
import os
import signal
import struct
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from polling import until
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_ncclsafe.loaders.tuning.measuring import Observer
from lightning_ncclsafe.loaders.tuning.resizing import ResizableLoader

PIPE_BYTES = 65536


class Items(Dataset[Any]):
    """Large items, which fill the pipe that workers send them through, or small ones."""

    def __init__(self, item_bytes: int = 1) -> None:
        self.item_bytes = item_bytes

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return index, bytes(self.item_bytes)


class Ending(Items):
    """Its worker ends by itself with item 5."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self.end = end

    def __getitem__(self, index: int) -> Any:
        if index == 5 and get_worker_info() is not None:
            self.end()
        return super().__getitem__(index)


def workers_of(tuned: ResizableLoader) -> list[psutil.Process]:
    (epoch,) = tuned._epochs
    assert epoch.pool is not None
    return [psutil.Process(pid) for pid in epoch.pool.pids]


def iterator_of(tuned: ResizableLoader) -> Any:
    (epoch,) = tuned._epochs
    assert epoch.pool is not None
    return epoch.pool.iterator


def indices(epoch: Iterator[Any]) -> list[int]:
    return [int(batch[0]) for batch in epoch]


@pytest.fixture
def tuned() -> Iterator[Callable[..., ResizableLoader]]:
    made: list[ResizableLoader] = []

    def make(dataset: Any, *, user_workers: int = 0, workers: int = 1, **keywords: Any) -> ResizableLoader:
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=user_workers, **keywords)
        observer = Observer(lambda _: None)
        made.append(ResizableLoader(loader, observer, user_workers=user_workers, say=lambda line: None))
        made[-1].resize(workers)
        return made[-1]

    yield make
    for each in made:
        each.close()


def reaped_by_psutil(worker: psutil.Process) -> None:
    psutil.wait_procs([worker], timeout=10)


def reaped_by_waitpid(worker: psutil.Process) -> None:
    os.waitpid(worker.pid, 0)


def reaped_by_nobody(worker: psutil.Process) -> None:
    until(lambda: worker.status() == psutil.STATUS_ZOMBIE)


def reaped_by_another_thread(worker: psutil.Process) -> None:
    def reap() -> None:
        with suppress(ChildProcessError):  # the loader has been faster
            os.waitpid(worker.pid, 0)

    threading.Thread(target=reap).start()


REAPERS = [reaped_by_psutil, reaped_by_waitpid, reaped_by_nobody, reaped_by_another_thread]


@pytest.mark.parametrize("reap", REAPERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_is_noticed_for_every_way_of_reaping(
    reap: Callable[[psutil.Process], None], workers: int, tuned: Callable[..., ResizableLoader]
) -> None:
    loader = tuned(Items(), workers=workers)
    epoch = loader.begin()
    next(epoch)
    worker = workers_of(loader)[0]
    worker.kill()
    reap(worker)
    assert indices(epoch) == list(range(1, 12))
    assert loader.frozen and loader.workers == 0


def test_a_killed_worker_reaped_by_the_kernel_is_noticed(tuned: Callable[..., ResizableLoader]) -> None:
    loader = tuned(Items())
    epoch = loader.begin()
    next(epoch)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        (worker,) = workers_of(loader)
        worker.kill()
        until(lambda: not worker.is_running())
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert indices(epoch) == list(range(1, 12))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_killed_while_sending_does_not_block(workers: int, tuned: Callable[..., ResizableLoader]) -> None:
    loader = tuned(Items(10 * PIPE_BYTES), workers=workers)
    epoch = loader.begin()
    next(epoch)
    pipe = iterator_of(loader)._worker_result_queue._reader

    def is_sending() -> bool:
        (queued,) = struct.unpack("i", fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4)))
        return bool(queued > PIPE_BYTES // 2)

    until(is_sending)  # all of it does not fit: whoever is sending cannot go on, and holds the lock
    for worker in workers_of(loader):
        worker.kill()
        worker.wait(10)
    assert indices(epoch) == list(range(1, 12))


def test_a_worker_killed_with_the_lock_does_not_block_the_other(tuned: Callable[..., ResizableLoader]) -> None:
    loader = tuned(Items(), workers=2)
    epoch = loader.begin()
    next(epoch)
    lock = iterator_of(loader)._worker_result_queue._wlock
    assert lock.acquire(timeout=10)  # as if the one that is killed had taken it
    workers_of(loader)[1].kill()
    assert indices(epoch) == list(range(1, 12))


@pytest.mark.parametrize("killed", [True, False])
def test_workers_end_even_if_their_event_lock_stays_held(killed: bool, tuned: Callable[..., ResizableLoader]) -> None:
    loader = tuned(Items(), workers=2)
    epoch = loader.begin()
    next(epoch)
    workers = workers_of(loader)
    assert iterator_of(loader)._workers_done_event._cond.acquire(timeout=10)
    if killed:
        workers[0].kill()
    loader.close()
    assert not any(worker.is_running() for worker in workers)
    assert indices(epoch) == list(range(1, 12))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"is killed by signal: Killed\. It was one of 2 workers"),
        (lambda: os.kill(os.getpid(), signal.SIGXCPU), r"is killed by signal: CPU time limit exceeded\."),
        (lambda: os._exit(3), r"exited unexpectedly with exit code 3\."),
        (lambda: os._exit(0), r"exited unexpectedly with exit code 0\."),
    ],
)
def test_a_killed_user_worker_raises_with_its_signal(
    end: Callable[[], None], said: str, tuned: Callable[..., ResizableLoader]
) -> None:
    loader = tuned(Ending(end), user_workers=2, workers=2)
    epoch = loader.begin()
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid \d+\) {said}"):
        indices(epoch)
    # Whoever catches that is not left to wait for what nobody makes.
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        indices(epoch)


def test_a_user_worker_reaped_by_other_code_has_an_unknown_status(tuned: Callable[..., ResizableLoader]) -> None:
    loader = tuned(Items(), user_workers=1)
    epoch = loader.begin()
    next(epoch)
    (worker,) = workers_of(loader)
    worker.kill()
    reaped_by_waitpid(worker)
    with pytest.raises(RuntimeError, match=rf"\(pid {worker.pid}\) exited unexpectedly\. Its exit status is unknown"):
        indices(epoch)


def test_a_dead_worker_is_noticed_before_a_long_user_timeout(tuned: Callable[..., ResizableLoader]) -> None:
    loader = tuned(Items(), workers=1, user_workers=1, timeout=3600)
    epoch = loader.begin()
    next(epoch)
    (worker,) = workers_of(loader)
    worker.kill()
    with pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        indices(epoch)


def test_a_persistent_worker_killed_between_epochs_is_replaced(tuned: Callable[..., ResizableLoader]) -> None:
    loader = tuned(Items(), user_workers=1, workers=2, persistent_workers=True)
    assert indices(loader.begin()) == list(range(12))
    assert loader._kept is not None
    worker = psutil.Process(loader._kept.pids[0])
    worker.kill()
    reaped_by_waitpid(worker)
    assert indices(loader.begin()) == list(range(12))
    assert loader.workers == 1


def stops_in_the_middle_of_sending(worker: psutil.Process, reader: threading.Thread) -> bool:
    worker.suspend()
    until(lambda: worker.status() == psutil.STATUS_STOPPED)
    functions = {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[reader.ident or 0])}
    if "receive" not in functions:
        worker.resume()
    return "receive" in functions


@pytest.mark.parametrize("sends", [True, False])
def test_a_worker_killed_while_memory_is_pinned_is_noticed(
    sends: bool, tuned: Callable[..., ResizableLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread and its queue are torch's own; a device for it is not here.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    loader = tuned(Items(1000 * PIPE_BYTES if sends else 1), pin_memory=True)
    epoch = loader.begin()
    next(epoch)
    iterator = iterator_of(loader)
    (worker,) = workers_of(loader)
    if sends:
        until(lambda: stops_in_the_middle_of_sending(worker, iterator._pin_memory_thread))
    worker.kill()
    reaped_by_waitpid(worker)
    assert indices(epoch) == list(range(1, 12))
    assert not iterator._pin_memory_thread.is_alive()


def test_no_signal_goes_to_a_reused_worker_pid(
    tuned: Callable[..., ResizableLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = tuned(Items(), workers=2)
    epoch = loader.begin()
    next(epoch)
    worker = workers_of(loader)[0]
    worker.kill()
    reaped_by_waitpid(worker)
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    assert indices(epoch) == list(range(1, 12))
    loader.close()
    assert worker.pid not in sent
