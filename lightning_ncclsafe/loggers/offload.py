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

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.own_work import OwnWork
from lightning_ncclsafe.facts import LoggerFacts
from lightning_ncclsafe.loggers import readers
from lightning_ncclsafe.loggers.delivery import Delivery, Sink
from lightning_ncclsafe.loggers.intake import Entry, Intake
from lightning_ncclsafe.loggers.ledger import Ledger, is_worth_saying, summary
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.stager import Encoder, Stager
from lightning_ncclsafe.loggers.store import Store
from lightning_ncclsafe.settings import OffloadSettings

_live: "weakref.WeakSet[Offload]" = weakref.WeakSet()
# By destination, what is set once an earlier offload has brought its rest there.
_unfinished: dict[str, threading.Event] = {}
# How long what came in at the last moment may take once everything else has been delivered.
_LAST_S = 1.0
# Condition variables do not wait for ever.
_LONG_S = 3600.0


class Backend(Encoder, Protocol):
    """One kind of logger.

    Attributes:
        path: Where it writes, for people.
        folders: Directories of this host in which a program may read what it has written, absolute.
        file_names: The files that it writes there, by a part of their names.
    """

    path: str
    folders: tuple[str, ...]
    file_names: tuple[str, ...]

    @property
    def sink(self) -> Sink:
        """Where its frames go."""

    def attach(self, offload: "Offload") -> None:
        """Puts itself between the logger and its callers."""

    def detach(self) -> None:
        """The logger's methods are its own again; also after an ``attach`` that failed half-way.

        In the first case the offload is closed by now, and what was accepted is delivered after this.
        """

    def finalize(self, status: str) -> None:
        """The logger's own finalize; after ``detach``, or in the middle of a run."""

    def close(self) -> None:
        """Everything has been delivered: the logger learns what it has to know, and nothing is left running."""


@marked(Mark.LOGGER)
class Offload:
    """Takes a logger off the training thread, until it is finalized for the last time.

    Args:
        backend: What to do with this kind of logger.
        name: Class name of the logger.
        settings: Limits and policies.
        store: Its local staging.
        ledger: What has become of everything.
        say: Prints to the user.

    Attributes:
        ending: Whether the Trainer is at its end, so that the next ``finalize`` is the last one.
        ended: Set once everything has been delivered after that.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        settings: OffloadSettings,
        store: Store,
        ledger: Ledger,
        say: Callable[[str], None],
    ) -> None:
        self.ending = False
        self.ended = threading.Event()
        self._backend = backend
        self._name = name
        self._settings = settings
        self._store = store
        self._ledger = ledger
        self._say = say
        self._closed = False
        # Whether somebody who read what was logged did not find all of it.
        self._is_behind = False
        # Of a process that was forked; nothing of this works there.
        self._is_forked = False
        self._intake = Intake(settings.memory_limit_bytes, settings.overflow, settings.block_s)
        self._delivery = Delivery(
            store,
            backend.sink,
            name=name,
            after=_unfinished_at(self._destination),
            on_fault=partial(ledger.say_storage_fault, path=backend.path, staging=str(store.folder)),
            on_lost=partial(ledger.lose, "a write", records=1),
        )
        self._stager = Stager(
            backend,
            intake=self._intake,
            store=store,
            delivery=self._delivery,
            ledger=ledger,
            settings=settings,
            name=name,
        )

    def start(self) -> None:
        """Puts itself between the logger and its callers.

        Raises:
            Exception: If that fails; the logger is as it was.
        """
        try:
            self._backend.attach(self)
        except BaseException:
            self._backend.detach()
            self._end()
            raise
        self._stager.start()
        _live.add(self)
        for folder in self._backend.folders:
            readers.watch(folder, self._backend.file_names, self.catch_up)
        atexit.register(self._at_exit)

    def forked(self) -> None:
        """This is a child of the process that it belongs to, which may hold its locks: it is not touched any more."""
        self._is_forked = True
        readers.leave(self.catch_up)
        atexit.unregister(self._at_exit)

    # What backends call, on any thread.

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is accepted."""
        return self._closed

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is one of ours: what it calls goes through."""
        return threading.current_thread().name.startswith("ncclsafe-")

    def put(self, entry: Entry) -> None:
        """Accepts what a logger was given."""
        if self._is_forked:
            return
        began = time.perf_counter()
        with OwnWork():
            self._intake.put(entry)
        self._ledger.waited_s += time.perf_counter() - began

    def run_on_delivery(self, job: Callable[[], None], data_bytes: int = 0) -> None:
        """Does something that touches the storage itself, in its own time.

        Args:
            job: What to do. If it waits already, it is done once.
            data_bytes: How much memory its arguments hold.
        """
        if self._delivery.jobs_bytes + data_bytes > self._settings.memory_limit_bytes:
            self._intake.dropped_records += 1
        else:
            self._delivery.add_job(job, data_bytes)

    def lose(self, name: str, error: Exception, *, points: int = 0, records: int = 0) -> None:
        """Something cannot be written, whatever its storage."""
        self._ledger.lose(name, error, points=points, records=records)

    def refuse(self, name: str, error: Exception, *, points: int = 0, records: int = 0) -> None:
        """The storage or server, to which it was given, has refused something for good."""
        self._ledger.refuse(name, error, points=points, records=records)

    def reject(self, frames: Sequence[StagedFrame], error: Exception) -> None:
        """The same of frames of one file."""
        points, records = sum(frame.points for frame in frames), sum(frame.records for frame in frames)
        self.refuse(frames[0].file, error, points=points, records=records)

    # What the Trainer, the guard and the interpreter call.

    def hurry(self) -> None:
        """What was accepted until now goes to storage as fast as that goes."""
        if not self._is_forked:
            self._stager.hurry()
            self._delivery.hurry()

    def wait(self, deadline: float) -> bool:
        """Waits until everything accepted is on storage; False at the deadline (seconds of the monotonic clock)."""
        return self._is_forked or (self._intake.wait_until_empty(deadline) and self._delivery.flush(deadline))

    def drain(self, timeout_s: float) -> bool:
        """Brings everything accepted to storage; False if that took too long."""
        began = time.monotonic()
        self.hurry()
        is_done = self.wait(began + timeout_s)
        self._ledger.finalize_s += time.monotonic() - began
        self._stager.relax()
        return is_done

    def catch_up(self, most_s: float = math.inf) -> None:
        """What was logged until now can be read where the logger puts it, as without an offload.

        Waits no longer than the end of a run does, and not at all where storage has not caught up since it was last
        waited for in vain, or refuses what it is given.

        Args:
            most_s: How long to wait at most, seconds.
        """
        if self._is_forked or self._closed or self.is_own_thread:
            return
        if not self._intake.pending_bytes and self._stager.is_idle and self._delivery.is_idle:
            return
        began = time.monotonic()
        deadline = began + (0.0 if self._is_behind else min(most_s, self._settings.finalize_s))
        self.hurry()
        is_done = self._intake.wait_until_empty(deadline) and self._delivery.flush(deadline, or_fault=True)
        self._stager.relax()
        self._is_behind = not is_done and (self._is_behind or most_s == math.inf)
        self._ledger.waited_s += time.monotonic() - began

    def finalize(self, status: str) -> None:
        """Brings everything to storage, within the deadline; if the Trainer is at its end, for the last time."""
        if self._is_forked:
            return
        if self.ending:
            self.close(status)
        elif self.drain(self._settings.finalize_s):
            self._finalize(status)

    def close(self, status: str | None = None) -> None:
        """Gives the logger back, brings everything to storage, and says what became of it."""
        if self._closed or self._is_forked:
            return
        self._closed = True
        _live.discard(self)
        readers.leave(self.catch_up)
        atexit.unregister(self._at_exit)
        # First, so that nothing new comes in meanwhile.
        self._backend.detach()
        is_done = self.drain(self._settings.finalize_s)
        self._intake.close()
        is_done = is_done and self._stager.join(_LAST_S) and self._delivery.flush(time.monotonic() + _LAST_S)
        if is_done:
            self._backend.close()
            if status is not None:
                self._finalize(status)
        facts = self.facts()
        if is_worth_saying(facts, is_done=is_done):
            self._say(summary(facts, is_done=is_done))
        if is_done:
            self._end()
        else:
            # As long as there is this process, it goes on trying; whoever writes there next waits for it.
            _set_unfinished(self._destination, self.ended)
            threading.Thread(target=self._end_later, name=f"ncclsafe-end-{self._name}", daemon=True).start()

    def facts(self) -> LoggerFacts:
        """What it has come to."""
        delivery, intake, store, ledger = self._delivery, self._intake, self._store, self._ledger
        dropped = intake.dropped_points + intake.dropped_records + store.dropped_points + store.dropped_records
        return LoggerFacts(
            logger=self._name,
            path=self._backend.path,
            points=delivery.points - ledger.refused_points,
            records=delivery.records - ledger.refused_records,
            thinned=self._stager.thinned + intake.thinned,
            dropped=dropped + ledger.lost_points + ledger.lost_records,
            memory_bytes=intake.pending_bytes + delivery.jobs_bytes,
            staged_bytes=store.pending_bytes,
            writing_s=round(delivery.writing_s, 3),
            longest_write_s=round(max(delivery.longest_write_s, delivery.writing_s), 3),
            waited_s=round(ledger.waited_s, 3),
            finalize_s=round(ledger.finalize_s, 3),
            faults=delivery.faults + ledger.failures,
            last_fault=repr(delivery.last_fault) if delivery.last_fault else ledger.last_failure,
            staging=str(store.folder),
        )

    @property
    def _destination(self) -> str:
        return f"{self._name} {self._backend.path}"

    def _finalize(self, status: str) -> None:
        try:
            self._backend.finalize(status)
        except Exception as error:
            self._ledger.lose("finalize", error)

    def _end_later(self) -> None:
        self._stager.join()
        while not self._delivery.flush(time.monotonic() + _LONG_S):
            pass
        with suppress(Exception):
            self._backend.close()
        self._end()

    def _end(self) -> None:
        self._delivery.close()
        self._store.close()
        self.ended.set()

    def _at_exit(self) -> None:
        with suppress(Exception):
            self.close()


@marked(Mark.LOGGER)
def drain_all(timeout_s: float) -> None:
    """Brings what all offloaded loggers of this process have accepted to storage, as far as that goes in the time.

    Args:
        timeout_s: Seconds for all of them together.
    """
    deadline = time.monotonic() + timeout_s
    offloads = list(_live)
    # All of them first: one whose storage is dead must not take the time of the others.
    for offload in offloads:
        with suppress(Exception):
            offload.hurry()
    for offload in offloads:
        with suppress(Exception):
            offload.wait(deadline)


def live_facts() -> tuple[LoggerFacts, ...]:
    """What the offloaded loggers of this process have come to."""
    return tuple(offload.facts() for offload in list(_live))


def _unfinished_at(destination: str) -> threading.Event | None:
    """What is set once an earlier offload has brought its rest to a destination; None if there is no such rest."""
    event = _unfinished.get(destination)
    if event is not None and event.is_set():
        del _unfinished[destination]
        return None
    return event


def _set_unfinished(destination: str, ended: threading.Event) -> None:
    """An offload ends with something left; ``ended`` is set once that is on storage."""
    for other in [other for other, event in _unfinished.items() if event.is_set()]:
        del _unfinished[other]
    _unfinished[destination] = ended


def _forget() -> None:
    for offload in list(_live):
        offload.forked()
    _live.clear()


os.register_at_fork(after_in_child=_forget)
