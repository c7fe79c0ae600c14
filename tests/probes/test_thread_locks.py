"""Which thread holds the lock that the thread that trains waits for, read in real threads."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ncclsafe.facts import ThreadLockFacts
from lightning_ncclsafe.probes.process import thread_waits

HERE = str(Path(__file__))
WAIT_S = 20.0


class Table:
    """What two threads write to."""

    def __init__(self, lock: object) -> None:
        self.lock = lock
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def keep(self) -> None:
        with self.lock:  # type: ignore[attr-defined]  # <- keeps
            self.has_begun.set()
            self.may_end.wait(WAIT_S)  # <- stands

    def write(self) -> None:
        with self.lock:  # type: ignore[attr-defined]
            pass

    def take(self) -> None:
        self.lock.acquire()  # type: ignore[attr-defined]
        self.lock.release()  # type: ignore[attr-defined]

    def again(self) -> None:
        with self.lock:  # type: ignore[attr-defined]  # <- outer
            self.lock.acquire(timeout=WAIT_S)  # type: ignore[attr-defined]

    def listen(self) -> None:
        self.may_end.wait(WAIT_S)


def line_of(mark: str) -> int:
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {mark}"))


def seen(thread: threading.Thread) -> ThreadLockFacts | None:
    """What is known once the thread stands in a call that waits."""
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s and thread.is_alive():
        if (found := thread_waits.awaited_thread_lock()) is not None:
            return found
        threading.Event().wait(0.01)
    return None


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock, threading.Condition])
@pytest.mark.parametrize("how", ["write", "take"])
def test_the_lock_holding_thread_is_found_with_its_line(
    kind: Callable[[], object], how: str, training: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    table = Table(kind())
    holder = threading.Thread(target=table.keep, name="keeper")
    holder.start()
    assert table.has_begun.wait(WAIT_S)
    found = seen(training(getattr(table, how)))
    table.may_end.set()
    holder.join(WAIT_S)
    assert found is not None and found.taken_at is not None
    assert (found.lock, found.thread, found.is_own) == ("self.lock", "keeper", False)
    assert (found.taken_at.file, found.taken_at.line, found.taken_at.function) == (HERE, line_of("keeps"), "keep")
    assert any(frame.line == line_of("stands") for frame in found.stack)


def test_a_lock_already_held_by_the_same_thread_is_found(
    training: Callable[[Callable[[], None]], threading.Thread],
) -> None:
    table = Table(threading.Lock())
    thread = training(table.again)
    found = seen(thread)
    table.lock.release()  # type: ignore[attr-defined]
    thread.join(WAIT_S)
    assert found is not None and found.is_own and found.taken_at is not None
    assert found.taken_at.line == line_of("outer")


def test_waiting_for_an_event_is_not_waiting_for_a_lock(
    training: Callable[[Callable[[], None]], threading.Thread],
) -> None:
    table = Table(threading.Lock())
    thread = training(table.listen)
    for _ in range(50):
        assert thread_waits.awaited_thread_lock() is None
        threading.Event().wait(0.002)
    table.may_end.set()
    thread.join(WAIT_S)
