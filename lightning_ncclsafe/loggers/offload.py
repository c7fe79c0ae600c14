"""One logger off the training thread: what it accepts is staged within half a second, and delivered in its own time."""

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from lightning_ncclsafe.logger_facts import LoggerFacts
from lightning_ncclsafe.loggers.delivery import Delivery, Sink
from lightning_ncclsafe.loggers.frames import Frame
from lightning_ncclsafe.loggers.intake import Call, Entry, Intake
from lightning_ncclsafe.loggers.store import Store
from lightning_ncclsafe.loggers.summary import summary
from lightning_ncclsafe.loggers.thinning import Scalars, Thinner
from lightning_ncclsafe.settings import OffloadSettings

# How long what was accepted may stay in memory only.
_STAGE_S = 0.25
# From this part of the disk's limit on, the newest points are thinned, twice as much for each halving of what is free.
_THIN_FROM = 0.5
# Media may take this part of the disk's limit; the rest is left to points, which are smaller and matter more.
_MEDIA_SHARE = 0.75

# How many different failures of single calls are printed.
_MOST_SAID = 5

_live: "weakref.WeakSet[Offload]" = weakref.WeakSet()


class Backend(Protocol):
    """What an offload needs to know about one kind of logger.

    Attributes:
        path: Where it writes, for people.
    """

    path: str

    @property
    def sink(self) -> Sink:
        """Where its frames go."""

    def attach(self, offload: "Offload") -> None:
        """Puts itself between the logger and its callers."""

    def detach(self) -> None:
        """The logger is as it was."""

    def scalars(self, scalars: Sequence[Scalars]) -> list[Frame]:
        """What points become; on the staging thread."""

    def call(self, call: Call) -> list[Frame]:
        """What a call becomes; on the staging thread, or that of media."""

    def finalize(self, status: str) -> None:
        """The logger's own finalize."""


class Offload:
    """Takes a logger off the training thread, until it is finalized for the last time.

    Args:
        backend: What to do with this kind of logger.
        name: Class name of the logger.
        settings: Limits and policies.
        store: Its local staging.
        say: Prints to the user.

    Attributes:
        ending: Whether the Trainer is at its end, so that the next ``finalize`` is the last one.
    """

    def __init__(
        self, backend: Backend, *, name: str, settings: OffloadSettings, store: Store, say: Callable[[str], None]
    ) -> None:
        self.ending = False
        self._backend = backend
        self._name = name
        self._settings = settings
        self._store = store
        self._say = say
        self._pid = os.getpid()
        self._waited_s = 0.0
        self._finalize_s = 0.0
        self._failures: list[str] = []
        self._lost = 0
        self._fault_is_said = False
        self._closed = False
        self._thinner = Thinner(settings.max_points_per_s)
        self._intake = Intake(settings.memory_limit_bytes, settings.overflow, settings.block_s)
        self._delivery = Delivery(
            store, backend.sink, name=name, on_fault=self._say_fault, on_lost=partial(self._failed, "a write")
        )
        self._hurried = threading.Event()
        self._threads = [
            threading.Thread(target=self._stage, name=f"ncclsafe-stage-{name}", daemon=True),
            threading.Thread(target=self._encode_media, name=f"ncclsafe-media-{name}", daemon=True),
        ]

    def start(self) -> None:
        """Puts itself between the logger and its callers.

        Raises:
            Exception: If that fails; the logger is as it was.
        """
        try:
            self._backend.attach(self)
        except Exception:
            self._backend.detach()
            self._delivery.close()
            self._store.close()
            raise
        for thread in self._threads:
            thread.start()
        _live.add(self)
        atexit.register(self._at_exit)

    def put(self, entry: Entry) -> None:
        """Accepts what a logger was given."""
        began = time.perf_counter()
        self._intake.put(entry)
        self._waited_s += time.perf_counter() - began

    def run_on_delivery(self, job: Callable[[], None]) -> None:
        """Does something that touches the storage itself, in its own time."""
        self._delivery.add_job(job)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is one of ours: what it calls goes through."""
        return threading.current_thread().name.startswith("ncclsafe-")

    def drain(self, timeout_s: float) -> bool:
        """Brings everything accepted to storage; False if that took too long. Only in the process that accepted it."""
        if self._closed or os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout_s
        self._hurried.set()
        self._intake.mark()
        try:
            return self._intake.wait_until_empty(deadline) and self._delivery.flush(deadline)
        finally:
            self._hurried.clear()

    def finalize(self, status: str) -> None:
        """Brings everything to storage, within the deadline, and if the Trainer is at its end gives the logger back."""
        began = time.perf_counter()
        is_done = self.drain(self._settings.finalize_s)
        self._finalize_s += time.perf_counter() - began
        if self.ending:
            self.close(is_done, status)
        elif is_done:
            self._finalize(status)

    def close(self, is_done: bool, status: str | None = None) -> None:
        """Gives the logger back, ends the threads and says what became of everything."""
        if self._closed:
            return
        self._closed = True
        _live.discard(self)
        atexit.unregister(self._at_exit)
        self._backend.detach()
        self._intake.close()
        self._delivery.wake()
        for thread in self._threads:
            thread.join(1.0)
        if is_done and status is not None:
            self._finalize(status)
        self._say(summary(self.facts(), is_done=is_done))
        if is_done:
            self._end()
        else:
            # As long as there is this process, it goes on trying.
            self._delivery.when_idle(self._end)

    def _end(self) -> None:
        self._delivery.close()
        self._store.close()

    def facts(self) -> LoggerFacts:
        """What it has come to."""
        delivery, intake, store = self._delivery, self._intake, self._store
        return LoggerFacts(
            logger=self._name,
            path=self._backend.path,
            points=delivery.points,
            records=delivery.records,
            thinned=self._thinner.thinned + intake.thinned,
            dropped=intake.dropped_points
            + intake.dropped_records
            + store.dropped_points
            + store.dropped_records
            + self._lost,
            pending_bytes=intake.pending_bytes + store.pending_bytes,
            writing_s=round(delivery.writing_s, 3),
            longest_write_s=round(max(delivery.longest_write_s, delivery.writing_s), 3),
            waited_s=round(self._waited_s, 3),
            finalize_s=round(self._finalize_s, 3),
            faults=delivery.faults + len(self._failures),
            last_fault=repr(delivery.last_fault) if delivery.last_fault else "".join(self._failures[-1:]),
            staging=str(store.folder),
        )

    def _finalize(self, status: str) -> None:
        try:
            self._backend.finalize(status)
        except Exception as error:
            self._failed("finalize", error)

    def _stage(self) -> None:
        while self._intake.wait_for_entries(None if self._thinner.idle else _STAGE_S):
            # So that many calls become one write.
            self._hurried.wait(_STAGE_S)
            entries = self._intake.take()
            try:
                self._append(self._frames(entries), self._settings.disk_limit_bytes)
            except Exception as error:
                self._failed("staging", error)
            finally:
                self._intake.done(entries)

    def _encode_media(self) -> None:
        while True:
            call = self._intake.take_media()
            if call is None:
                return
            try:
                self._append(self._frames_of_call(call), int(_MEDIA_SHARE * self._settings.disk_limit_bytes))
            finally:
                self._intake.done([call])

    def _frames(self, entries: Sequence[Entry]) -> list[Frame]:
        """What these entries become, in order."""
        now = time.monotonic()
        self._thinner.coarseness = self._coarseness()
        frames: list[Frame] = []
        points: list[Scalars] = []
        for entry in entries:
            if isinstance(entry, Scalars):
                points += self._thinner.offer(entry, now)
                continue
            frames += self._backend.scalars(points + (self._thinner.rest() if entry.is_marker else []))
            points = []
            frames += [] if entry.is_marker else self._frames_of_call(entry)
        return frames + self._backend.scalars(points + self._thinner.due(now))

    def _frames_of_call(self, call: Call) -> list[Frame]:
        try:
            for event in call.events:
                event.synchronize()
            return self._backend.call(call)
        except Exception as error:
            self._failed(call.name, error)
            return []

    def _append(self, frames: list[Frame], limit_bytes: int) -> None:
        if not frames:
            return
        size = sum(len(frame.body) for frame in frames)
        if self._settings.overflow == "block":
            self._delivery.wait_until(lambda: self._store.pending_bytes + size <= limit_bytes or self._closed)
        while self._store.pending_bytes + size > limit_bytes and self._settings.overflow == "drop_oldest":
            if not self._store.drop_oldest():
                break
        is_full = self._store.pending_bytes + size > limit_bytes
        self._store.append(self._kept(frames) if is_full else frames)
        self._delivery.wake()

    def _kept(self, frames: list[Frame]) -> list[Frame]:
        for frame in frames:
            if not frame.keep:
                self._store.count_dropped(frame)
        return [frame for frame in frames if frame.keep]

    def _coarseness(self) -> int:
        if self._settings.overflow == "drop_oldest":
            return 0
        free = max(1.0 - self._store.pending_bytes / self._settings.disk_limit_bytes, 1e-6)
        return 1 + int(math.log2(_THIN_FROM / free)) if free <= _THIN_FROM else 0

    def lose(self, name: str, error: Exception) -> None:
        """A call that cannot be made, however often it is tried."""
        self._failed(name, error)

    def count_dropped(self) -> None:
        """A call was dropped over the limit of memory."""
        self._intake.dropped_records += 1

    def _failed(self, name: str, error: Exception) -> None:
        """One call could not be written, whatever its storage: said once for each kind."""
        text = f"{self._name}: {name} failed: {error!r}"
        self._lost += 1
        if text not in self._failures:
            self._failures.append(text)
            if len(self._failures) <= _MOST_SAID:
                self._say(f"{text}; it is left out, training goes on")

    def _say_fault(self, error: Exception) -> None:
        if not self._fault_is_said:
            self._fault_is_said = True
            self._say(
                f"{self._name} cannot write to {self._backend.path}: {error!r}; training goes on, it is tried again,"
                f" what is logged waits in {self._store.folder}"
            )

    def _at_exit(self) -> None:
        with suppress(Exception):
            self.close(self.drain(self._settings.finalize_s))


def drain_all(timeout_s: float) -> None:
    """Brings what all offloaded loggers of this process have accepted to storage, as far as that goes in the time.

    Args:
        timeout_s: Seconds for all of them together.
    """
    deadline = time.monotonic() + timeout_s
    for offload in list(_live):
        with suppress(Exception):
            offload.drain(deadline - time.monotonic())


def live_facts() -> tuple[LoggerFacts, ...]:
    """What the offloaded loggers of this process have come to."""
    return tuple(offload.facts() for offload in list(_live))
