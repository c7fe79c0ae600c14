"""The thread that delivers staged frames to a logger's storage or server, however long that takes to answer."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.store import Store

# The pause between two deliveries, in multiples of the last write, so that storage is not kept busy.
_PACE_TIMES = 4.0
_LONGEST_PACE_S = 30.0
# A backlog goes out in one series of writes; the pause is for what arrives little by little.
_MOST_PORTIONS = 32
_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0
# Attempts at a job whose error is unlikely to pass.
_ATTEMPTS = 3
_LASTING = {errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP}


class Sink(Protocol):
    """Where frames go."""

    pace_s: float
    """Least pause between two deliveries, seconds."""

    def deliver(self, frames: Sequence[StagedFrame]) -> None:
        """Delivers frames, in order.

        Raises:
            Exception: If the storage or the server refuses. The same frames, and more, may come again.
        """


@dataclass(slots=True)
class _Job:
    call: Callable[[], None]
    data_bytes: int
    attempts: int = 0


class Delivery:
    """Delivers what a store holds, in the background. A fault is retried, later each time, for as long as it lasts.

    Args:
        on_fault: Called with the first error of each series.
        on_lost: Called with the error of a job that is given up.
        after: Set before the first delivery may begin: the rest of an earlier offload for the same files comes first.

    Attributes:
        points: Points delivered.
        records: Everything else delivered.
        longest_write_s: The longest completed write, seconds.
        faults: Deliveries that failed.
        last_fault: The last error.
    """

    def __init__(
        self,
        store: Store,
        sink: Sink,
        *,
        name: str,
        on_fault: Callable[[Exception], None],
        on_lost: Callable[[Exception], None] = lambda _: None,
        after: threading.Event | None = None,
    ) -> None:
        self.points = 0
        self.records = 0
        self.longest_write_s = 0.0
        self.faults = 0
        self.last_fault: Exception | None = None
        self._store = store
        self._sink = sink
        self._on_fault = on_fault
        self._on_lost = on_lost
        self._after = after
        self._jobs: list[_Job] = []
        self._retry_s = 0.0
        self._next_s = 0.0
        self._last_write_s = 0.0
        self._since_s: float | None = None
        self._is_busy = False
        self._hurried = False
        self._closed = False
        self._changed = threading.Condition()
        # A daemon: storage that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"ncclsafe-write-{name}", daemon=True)
        self._thread.start()

    @property
    def writing_s(self) -> float:
        """How long the present write has waited for the storage, seconds; 0 if there is none."""
        since = self._since_s
        return time.monotonic() - since if since is not None else 0.0

    @property
    def is_idle(self) -> bool:
        """Whether everything staged is delivered."""
        with self._changed:
            return not self._is_busy and not self._jobs and not self._store.pending_bytes

    @property
    def jobs_bytes(self) -> int:
        """Memory of the arguments of waiting jobs."""
        return sum(job.data_bytes for job in list(self._jobs))

    def wake(self) -> None:
        """Notes that there is something to deliver."""
        with self._changed:
            self._changed.notify_all()

    def add_job(self, call: Callable[[], None], data_bytes: int = 0) -> None:
        """Adds something to do on this thread, as it writes to the storage itself; once, if it is still waiting."""
        with self._changed:
            if not any(job.call == call for job in self._jobs):
                self._jobs.append(_Job(call, data_bytes))
            self._changed.notify_all()

    def hurry(self) -> None:
        """Delivers everything without pauses until a flush has ended."""
        with self._changed:
            self._hurried, self._next_s = True, 0.0
            self._changed.notify_all()

    def flush(self, deadline: float, *, or_fault: bool = False) -> bool:
        """Delivers everything now; False at the deadline (seconds of the monotonic clock).

        Args:
            or_fault: Whether to give up also as soon as the storage refuses.
        """
        self.hurry()
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_idle or (or_fault and self._retry_s > 0), max(deadline - time.monotonic(), 0.0)
            )
            self._hurried = False
            return self.is_idle

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that only deliveries, or the end, can make true."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._closed)

    def close(self) -> None:
        """Ends the thread, unless its storage does not answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._since_s is None and threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        if self._after is not None:
            self._after.wait()
        while self._wait_for_work():
            try:
                self._deliver()
                self._retry_s = 0.0
            except Exception as error:
                self._failed(error)
            pace_s = self._retry_s or min(max(self._sink.pace_s, _PACE_TIMES * self._last_write_s), _LONGEST_PACE_S)
            with self._changed:
                self._is_busy = False
                if self._hurried:
                    pace_s = _FIRST_RETRY_S if self._retry_s else 0.0
                self._next_s = time.monotonic() + pace_s
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._closed:
                if self.is_idle:
                    self._changed.notify_all()
                    self._changed.wait()
                    continue
                wait_s = self._next_s - time.monotonic()
                if wait_s <= 0:
                    self._is_busy = True
                    return True
                self._changed.wait(wait_s)
            return False

    def _deliver(self) -> None:
        for _ in range(_MOST_PORTIONS):
            portion = self._store.read()
            if portion is None:
                break
            frames = portion.frames
            with self._timed():
                self._sink.deliver(frames)
            self._store.release(portion)
            self.points += sum(frame.points for frame in frames)
            self.records += sum(frame.records for frame in frames)
            # A thread may be waiting for room.
            self.wake()
        while self._jobs:
            self._do(self._jobs[0])

    def _do(self, job: _Job) -> None:
        with self._changed:
            self._jobs.remove(job)
        try:
            with self._timed():
                job.call()
        except Exception as error:
            job.attempts += 1
            is_tried = isinstance(error, OSError) and (error.errno not in _LASTING or job.attempts < _ATTEMPTS)
            if not is_tried:
                # What is behind it must not wait forever.
                self._on_lost(error)
                return
            with self._changed:
                # Unless it has been added again in the meantime.
                if not any(other.call == job.call for other in self._jobs):
                    self._jobs.insert(0, job)
            raise

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._since_s = began = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None
            self._last_write_s = time.monotonic() - began
            self.longest_write_s = max(self.longest_write_s, self._last_write_s)

    def _failed(self, error: Exception) -> None:
        self.faults += 1
        self.last_fault = error
        if not self._retry_s:
            self._on_fault(error)
        self._retry_s = min(2 * self._retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
