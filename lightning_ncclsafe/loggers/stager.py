"""The threads that turn what a logger is given into frames and stage these locally."""

import math
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from lightning_ncclsafe.code.own_work import OwnWork
from lightning_ncclsafe.loggers.delivery import Delivery
from lightning_ncclsafe.loggers.intake import MARKER, Entry, Intake, LoggedCall, LoggedScalars, Thinner
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.store import Store
from lightning_ncclsafe.settings import OffloadSettings

# How long what is accepted may stay in memory only.
_STAGE_S = 0.25
# Beyond this share of the disk's limit new points are thinned, twice as much with each halving of the free space.
_THIN_FROM = 0.5
# Media may take this share of the disk's limit; the rest is left to points, which are smaller and matter more.
_MEDIA_SHARE = 0.75


class Encoder(Protocol):
    """Turns entries into frames."""

    def scalars(self, scalars: Sequence[LoggedScalars]) -> list[StagedFrame]:
        """The frames of points, of which there is one at least; on the staging thread."""

    def call(self, call: LoggedCall) -> list[StagedFrame]:
        """The frames of a call; on the staging thread or that of media."""


class Stager:
    """Stages what arrives in an intake: one thread for points and short calls, one for media."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        intake: Intake,
        store: Store,
        delivery: Delivery,
        ledger: Ledger,
        settings: OffloadSettings,
        name: str,
    ) -> None:
        self._encoder = encoder
        self._intake = intake
        self._store = store
        self._delivery = delivery
        self._ledger = ledger
        self._settings = settings
        self._thinner = Thinner(settings.max_points_per_s)
        self._hurried = threading.Event()
        self._threads = [
            threading.Thread(target=self._stage, name=f"ncclsafe-stage-{name}", daemon=True),
            threading.Thread(target=self._stage_media, name=f"ncclsafe-media-{name}", daemon=True),
        ]

    @property
    def thinned(self) -> int:
        """Points that were left out, represented by others."""
        return self._thinner.thinned

    @property
    def is_idle(self) -> bool:
        """Whether no point waits for the end of its window."""
        return self._thinner.idle

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def hurry(self) -> None:
        """Stages at once from now on, without waiting for more."""
        self._hurried.set()
        self._intake.mark()

    def relax(self) -> None:
        """Waits for more again, so that many calls become one write."""
        self._hurried.clear()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until everything is staged, once the intake is closed; False if it takes longer."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _stage(self) -> None:
        while self._intake.wait_for_entries(None if self._thinner.idle else _STAGE_S):
            self._hurried.wait(_STAGE_S)
            entries = self._intake.take()
            try:
                self._append(self._frames(entries), self._settings.disk_limit_bytes)
            except Exception as error:
                self._ledger.lose("staging", error, len(entries))
            finally:
                self._intake.done(entries)
        self._append(self._frames_of_points(self._thinner.rest()), self._settings.disk_limit_bytes)

    def _stage_media(self) -> None:
        while (call := self._intake.take_media()) is not None:
            try:
                self._append(self._frames_of_call(call), int(_MEDIA_SHARE * self._settings.disk_limit_bytes))
            except Exception as error:
                self._ledger.lose(call.name, error)
            finally:
                self._intake.done([call])

    def _frames(self, entries: Sequence[Entry]) -> list[StagedFrame]:
        """The frames of these entries, in order."""
        now = time.monotonic()
        self._thinner.coarseness = self._coarseness()
        frames: list[StagedFrame] = []
        points: list[LoggedScalars] = []
        for entry in entries:
            if isinstance(entry, LoggedScalars):
                points += self._thinner.offer(entry, now)
                continue
            if entry is MARKER:
                frames += self._frames_of_points(points + self._thinner.rest())
            else:
                frames += self._frames_of_points(points) + self._frames_of_call(entry)
            points = []
        return frames + self._frames_of_points(points + self._thinner.due(now))

    def _frames_of_points(self, points: Sequence[LoggedScalars]) -> list[StagedFrame]:
        if not points:
            return []
        try:
            with OwnWork():
                return self._encoder.scalars(points)
        except Exception as error:
            if len(points) == 1:
                self._ledger.lose("log_metrics", error, len(points[0].values))
                return []
        # One of them is wrong and must not cost the others.
        return [frame for one in points for frame in self._frames_of_points([one])]

    def _frames_of_call(self, call: LoggedCall) -> list[StagedFrame]:
        try:
            for event in call.events:
                event.synchronize()
            return self._encoder.call(call)
        except Exception as error:
            self._ledger.lose(call.name, error)
            return []

    def _append(self, frames: list[StagedFrame], limit_bytes: int) -> None:
        if not frames:
            return
        size = sum(len(frame.body) for frame in frames)
        if self._settings.overflow == "block" and size <= limit_bytes:
            self._delivery.wait_until(lambda: self._has_room(size, limit_bytes) or self._intake.is_closed)
        while not self._has_room(size, limit_bytes) and self._settings.overflow == "drop_oldest":
            if not self._store.drop_oldest():
                break
        self._store.append(frames if self._has_room(size, limit_bytes) else self._kept(frames))
        self._delivery.wake()

    def _has_room(self, size: int, limit_bytes: int) -> bool:
        return self._store.pending_bytes + size <= limit_bytes

    def _kept(self, frames: list[StagedFrame]) -> list[StagedFrame]:
        for frame in frames:
            if not frame.keep:
                self._store.count_dropped(frame)
        return [frame for frame in frames if frame.keep]

    def _coarseness(self) -> int:
        if self._settings.overflow == "drop_oldest":
            return 0
        free = max(1.0 - self._store.pending_bytes / self._settings.disk_limit_bytes, 1e-6)
        return 1 + int(math.log2(_THIN_FROM / free)) if free <= _THIN_FROM else 0
