"""One logger off the training thread: what it accepts is staged within half a second and delivered at its own pace."""

import atexit
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.own_work import OwnWork
from lightning_ncclsafe.code.side_thread import OWN_THREADS
from lightning_ncclsafe.facts import LoggerFacts
from lightning_ncclsafe.loggers import readers
from lightning_ncclsafe.loggers.delivery import Delivery, Sink
from lightning_ncclsafe.loggers.intake import Entry, Intake
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.stager import Encoder, Stager
from lightning_ncclsafe.loggers.store import Store
from lightning_ncclsafe.settings import OffloadSettings

_live: "weakref.WeakSet[Offload]" = weakref.WeakSet()
# By destination, set once an earlier offload has delivered its rest there.
_unfinished: dict[str, threading.Event] = {}
# How long to wait for what came in last, once everything else is delivered.
_LAST_S = 1.0
# Condition variables do not wait forever.
_LONG_S = 3600.0


@marked(Mark.LOGGER)
class Backend(Encoder, ABC):
    """One kind of logger: replaces its methods, and turns what they are given into frames.

    Args:
        logger: The logger; its experiment exists.

    Attributes:
        name: Class name of the logger.
        path: Where it writes, to display.
        sink: Where its frames go.
        folders: Absolute paths of the directories of this host where a program may read what it writes.
        file_names: Parts of the names of files that it writes there.
    """

    sink: Sink
    folders: tuple[str, ...] = ()
    file_names: tuple[str, ...] = ()

    def __init__(self, logger: Any, path: str, ledger: Ledger) -> None:
        self.name = type(logger).__name__
        self.path = path
        self._logger = logger
        self._ledger = ledger

    def attach(self, offload: "Offload") -> None:
        """Replaces methods of the logger by its own."""
        self._offload = offload
        self._replace_methods()

    @abstractmethod
    def _replace_methods(self) -> None: ...

    @abstractmethod
    def detach(self) -> None:
        """Restores the logger's methods, also after an ``attach`` that failed half-way.

        Otherwise the offload is closed by now, and what it accepted is delivered after this.
        """

    def finalize(self, status: str) -> None:
        """Calls the logger's own finalize; after ``detach``, or in the middle of a run."""
        type(self._logger).finalize(self._logger, status)

    @abstractmethod
    def close(self) -> None:
        """Ends what is still running, and updates the logger, once everything is delivered."""


@marked(Mark.LOGGER)
class Offload:
    """Takes a logger off the training thread, until it is finalized for the last time.

    Attributes:
        ending: Whether the Trainer is ending, so that the next ``finalize`` is the last one.
        ended: Set once everything is delivered after that.
        is_closed: Whether nothing more is accepted.
    """

    def __init__(self, backend: Backend, *, settings: OffloadSettings, store: Store, ledger: Ledger) -> None:
        self.ending = False
        self.ended = threading.Event()
        self._backend = backend
        self._settings = settings
        self._store = store
        self.ledger = ledger
        self.is_closed = False
        # Whether a reader of what was logged did not find all of it.
        self._is_behind = False
        # In a forked child, where none of this works.
        self._is_forked = False
        self._intake = Intake(settings.memory_limit_bytes, settings.overflow, settings.block_s)
        self._delivery = Delivery(
            store,
            backend.sink,
            name=backend.name,
            after=_unfinished.get(self._destination),
            on_fault=partial(ledger.report_storage_fault, path=backend.path, staging=str(store.folder)),
            on_lost=partial(ledger.lose, "a write"),
        )
        self._stager = Stager(
            backend,
            intake=self._intake,
            store=store,
            delivery=self._delivery,
            ledger=ledger,
            settings=settings,
            name=backend.name,
        )

    def start(self) -> None:
        """Puts itself between the logger and its callers.

        Raises:
            Exception: If that fails; the logger is restored.
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
        """Does nothing any more in a forked child, as the parent may hold its locks."""
        self._is_forked = True
        readers.leave(self.catch_up)
        atexit.unregister(self._at_exit)

    # What backends call, on any thread.

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is one of our threads, whose calls go straight to the logger."""
        return threading.current_thread().name.startswith(OWN_THREADS)

    def put(self, entry: Entry) -> None:
        """Accepts what a logger is given."""
        if self._is_forked:
            return
        began = time.perf_counter()
        with OwnWork():
            self._intake.put(entry)
        self.ledger.wait(time.perf_counter() - began)

    def run_on_delivery(self, job: Callable[[], None], data_bytes: int = 0) -> None:
        """Runs what writes to the storage itself on the delivering thread; once, if it is already waiting."""
        if self._delivery.jobs_bytes + data_bytes > self._settings.memory_limit_bytes:
            self._intake.dropped_records += 1
        else:
            self._delivery.add_job(job, data_bytes)

    # What the Trainer, the guard and the interpreter call.

    def hurry(self) -> None:
        """Delivers what is accepted so far as fast as possible."""
        if not self._is_forked:
            self._stager.hurry()
            self._delivery.hurry()

    def wait(self, deadline: float) -> bool:
        """Waits until everything accepted is on storage; False at the deadline (seconds of the monotonic clock)."""
        return self._is_forked or (self._intake.wait_until_empty(deadline) and self._delivery.flush(deadline))

    def drain(self, timeout_s: float) -> bool:
        """Delivers everything accepted; False if it takes too long."""
        began = time.monotonic()
        self.hurry()
        is_done = self.wait(began + timeout_s)
        self.ledger.finalize_s += time.monotonic() - began
        self._stager.relax()
        return is_done

    def catch_up(self, most_s: float = math.inf) -> None:
        """Delivers what is logged so far, so that it can be read where the logger puts it, as without an offload.

        Waits no longer than ``most_s`` or ``finalize_s``. Does not wait if storage refuses to write, or has not caught
        up since an earlier wait ran out of time.
        """
        if self._is_forked or self.is_closed or self.is_own_thread:
            return
        if not self._intake.pending_bytes and self._stager.is_idle and self._delivery.is_idle:
            return
        began = time.monotonic()
        deadline = began + (0.0 if self._is_behind else min(most_s, self._settings.finalize_s))
        self.hurry()
        is_done = self._intake.wait_until_empty(deadline) and self._delivery.flush(deadline, or_fault=True)
        self._stager.relax()
        self._is_behind = not is_done and (self._is_behind or most_s == math.inf)
        self.ledger.wait(time.monotonic() - began)

    def finalize(self, status: str) -> None:
        """Delivers everything within the deadline; for the last time if the Trainer is ending."""
        if self._is_forked:
            return
        if self.ending:
            self.close(status)
        elif self.drain(self._settings.finalize_s):
            self._finalize(status)

    def close(self, status: str | None = None) -> None:
        """Restores the logger, delivers everything, and prints what became of it."""
        if self.is_closed or self._is_forked:
            return
        self.is_closed = True
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
        self.ledger.sum_up(self.facts(), is_done=is_done)
        if is_done:
            self._end()
        else:
            # It keeps trying for as long as this process lives; the next offload that writes there waits for it.
            for other in [other for other, event in _unfinished.items() if event.is_set()]:
                del _unfinished[other]
            _unfinished[self._destination] = self.ended
            threading.Thread(target=self._end_later, name=f"ncclsafe-end-{self._backend.name}", daemon=True).start()

    def facts(self) -> LoggerFacts:
        """Its counters and times."""
        delivery, intake, store, ledger = self._delivery, self._intake, self._store, self.ledger
        dropped = intake.dropped_points + intake.dropped_records + store.dropped_points + store.dropped_records
        return LoggerFacts(
            logger=self._backend.name,
            path=self._backend.path,
            points=delivery.points - ledger.refused_points,
            records=delivery.records - ledger.refused_records,
            thinned=self._stager.thinned + intake.thinned,
            dropped=dropped + ledger.lost,
            memory_bytes=intake.pending_bytes + delivery.jobs_bytes,
            staged_bytes=store.pending_bytes,
            writing_s=round(delivery.writing_s, 3),
            longest_write_s=round(max(delivery.longest_write_s, delivery.writing_s), 3),
            waited_s=round(ledger.waited_s, 3),
            longest_wait_s=round(ledger.longest_wait_s, 3),
            finalize_s=round(ledger.finalize_s, 3),
            faults=delivery.faults + ledger.failures,
            last_fault=repr(delivery.last_fault) if delivery.last_fault else ledger.last_failure,
            staging=str(store.folder),
        )

    @property
    def _destination(self) -> str:
        return f"{self._backend.name} {self._backend.path}"

    def _finalize(self, status: str) -> None:
        try:
            self._backend.finalize(status)
        except Exception as error:
            self.ledger.lose("finalize", error, 0)

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
    """Delivers what all offloaded loggers of this process have accepted, as far as possible in this many seconds."""
    deadline = time.monotonic() + timeout_s
    offloads = list(_live)
    # All of them first: dead storage of one must not use up the time of the others.
    for offload in offloads:
        with suppress(Exception):
            offload.hurry()
    for offload in offloads:
        with suppress(Exception):
            offload.wait(deadline)


def live_facts() -> tuple[LoggerFacts, ...]:
    """Counters and times of the offloaded loggers of this process."""
    return tuple(offload.facts() for offload in list(_live))


def _forget() -> None:
    for offload in list(_live):
        offload.forked()
    _live.clear()


os.register_at_fork(after_in_child=_forget)
