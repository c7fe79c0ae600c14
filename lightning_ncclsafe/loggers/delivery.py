"""The thread that brings staged frames to a logger's storage or server, however long that takes to answer."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_ncclsafe.loggers.frames import Frame
from lightning_ncclsafe.loggers.store import Store

# Between two deliveries passes at least this many times what the last one took, so that a storage is not kept busy.
_PACE_TIMES = 4.0
_LONGEST_PACE_S = 30.0
_MOST_PORTIONS = 32
_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


class Sink(Protocol):
    """Where frames go."""

    pace_s: float
    """What passes between two deliveries at least, seconds."""

    def deliver(self, frames: Sequence[Frame]) -> None:
        """Delivers frames, in order.

        Raises:
            Exception: If the storage or the server refuses. The same frames, and more, may be given again.
        """


class Delivery:
    """Delivers what a store holds, in the background. A fault is tried again, later each time, for as long as it lasts.

    Args:
        store: What is staged.
        sink: Where it goes.
        name: Whose it is, for the thread's name.
        on_fault: Told of the first error of each row of failures.
        on_lost: Told of a job that cannot be done, however often it is tried.

    Attributes:
        points: Points delivered.
        records: Everything else delivered.
        longest_write_s: The longest delivery that has ended, seconds.
        faults: Deliveries that failed.
        last_fault: The last of these errors.
    """

    def __init__(
        self,
        store: Store,
        sink: Sink,
        *,
        name: str,
        on_fault: Callable[[Exception], None],
        on_lost: Callable[[Exception], None] = lambda _: None,
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
        self._jobs: list[Callable[[], None]] = []
        self._retry_s = 0.0
        self._next_s = 0.0
        self._since_s: float | None = None
        self._then: Callable[[], None] | None = None
        self._hurried = False
        self._closed = False
        self._changed = threading.Condition()
        # A daemon: a storage that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"ncclsafe-write-{name}", daemon=True)
        self._thread.start()

    @property
    def writing_s(self) -> float:
        """For how long the delivery that is going on has waited for the storage; 0 if there is none."""
        since = self._since_s
        return time.monotonic() - since if since is not None else 0.0

    def wake(self) -> None:
        """There is something to deliver."""
        with self._changed:
            self._changed.notify_all()

    def add_job(self, job: Callable[[], None]) -> None:
        """Something that is to be done on this thread, as it touches the storage itself; once, if it still waits."""
        with self._changed:
            if job not in self._jobs:
                self._jobs.append(job)
            self._changed.notify_all()

    def flush(self, deadline: float) -> bool:
        """Delivers everything now; False at the deadline (seconds of the monotonic clock)."""
        with self._changed:
            self._hurried, self._next_s = True, 0.0
            self._changed.notify_all()
            is_done = self._changed.wait_for(self._is_idle, max(deadline - time.monotonic(), 0.0))
            self._hurried = False
        return is_done

    def when_idle(self, act: Callable[[], None]) -> None:
        """Does something, on this thread, as soon as everything has been delivered."""
        with self._changed:
            self._then = act
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds that only deliveries, or the end, bring about."""
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
        while self._wait_for_work():
            self._since_s = began = time.monotonic()
            try:
                self._deliver()
                self._retry_s = 0.0
            except Exception as error:
                self._failed(error)
            finally:
                self._since_s = None
            took = time.monotonic() - began
            self.longest_write_s = max(self.longest_write_s, took)
            pace_s = self._retry_s or min(max(self._sink.pace_s, _PACE_TIMES * took), _LONGEST_PACE_S)
            with self._changed:
                if self._hurried:
                    pace_s = _FIRST_RETRY_S if self._retry_s else 0.0
                self._next_s = time.monotonic() + pace_s
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._closed:
                if self._is_idle():
                    self._changed.notify_all()
                    if self._then is not None:
                        break
                    self._changed.wait()
                    continue
                wait_s = self._next_s - time.monotonic()
                if wait_s <= 0:
                    return True
                self._changed.wait(wait_s)
        if self._then is not None and not self._closed:
            self._then()
        return False

    def _is_idle(self) -> bool:
        return self._since_s is None and not self._jobs and not self._store.pending_bytes

    def _deliver(self) -> None:
        while self._jobs:
            job = self._jobs.pop(0)
            try:
                job()
            except OSError:
                with self._changed:
                    # Unless it has been asked for again in the meantime.
                    self._jobs[:0] = [] if job in self._jobs else [job]
                raise
            except Exception as error:
                # Not the storage's fault; what waits behind it is not to wait for ever.
                self._on_lost(error)
        # A backlog goes in one row of writes; the pause is for those who log little by little.
        for _ in range(_MOST_PORTIONS):
            portion = self._store.read()
            if portion is None:
                return
            self._sink.deliver(portion.frames)
            self._store.release(portion)
            self.points += sum(frame.points for frame in portion.frames)
            self.records += sum(frame.records for frame in portion.frames)

    def _failed(self, error: Exception) -> None:
        self.faults += 1
        self.last_fault = error
        if not self._retry_s:
            self._on_fault(error)
        self._retry_s = min(2 * self._retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
