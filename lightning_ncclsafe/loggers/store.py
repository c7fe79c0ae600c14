"""Local staging: what a logger has accepted and its storage does not have yet, on a local disk."""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_ncclsafe.loggers.segments import (
    Note,
    Portion,
    Segment,
    StagedFrame,
    encode,
    find_segments,
    read_note,
    write_note,
)
from lightning_ncclsafe.loggers.staging import MANIFEST, Claim, keep_staging, read_small, remove_staging

_SEGMENT_BYTES = 1 << 20
# How long to wait before writing to a full disk again: what waits in memory may be large.
_TRY_AGAIN_S = 5.0
# A file that cannot be opened for these reasons is not lost: it can be opened later.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)


class Store:
    """A folder of staged frames. Any thread may append; one thread reads and releases.

    If the folder cannot be written to (a full disk), frames stay in memory, at most ``spill_bytes`` of them. If it is
    removed, it is created again, and what was in it counts as dropped.

    Args:
        folder: The folder; created, readable by this user only.
        spill_bytes: Most bytes kept in memory while the folder cannot be written to.
        claim: The claim on the folder, given up with the store.
        on_fault: Called with the first error of each series, on the thread that meets it.

    Attributes:
        dropped_points: Points that were dropped.
        dropped_records: Media, texts and the like that were dropped.
        anchors: State of each file of the destination after its last delivery; kept across a crash.

    Raises:
        OSError: If the folder cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        spill_bytes: int = 1 << 26,
        claim: Claim | None = None,
        on_fault: Callable[[OSError], None] | None = None,
    ) -> None:
        self.folder = folder
        self.dropped_points = 0
        self.dropped_records = 0
        self.anchors: dict[str, dict[str, Any]] = {}
        self._spill_bytes = spill_bytes
        self._claim = claim
        self._on_fault = on_fault
        self._is_faulty = False
        # An error to report once the lock is free.
        self._unreported: OSError | None = None
        self._pid = os.getpid()
        self._closed = False
        self._spilled: deque[tuple[StagedFrame, int]] = deque()
        self._spilled_bytes = 0
        self._next_try_s = 0.0
        self._segments: deque[Segment] = deque()
        self._number = 0
        self._reading: int | None = None
        # Number of spilled frames that are being delivered.
        self._reading_spilled = 0
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._manifest = read_small(folder / MANIFEST)
            self._load()
        except BaseException:
            self._give_up_claim()
            raise

    def vacate(self) -> None:
        """Removes the folder if nothing waits in it; it is created again when there is something to stage."""
        with self._lock:
            self._vacate()

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait to be delivered."""
        with self._lock:
            return self._pending()

    def append(self, frames: Sequence[StagedFrame]) -> None:
        """Writes frames, all or none. They survive this process, but not a crash of the host."""
        data = b"".join(map(encode, frames))
        if not data:
            return
        with self._working():
            if self._spilled and not self._unspill():
                self._spill(frames)
                return
            try:
                self._write(data, frames)
            except OSError as error:
                self._failed(error)
                self._spill(frames)

    def read(self, most_bytes: int = 4 << 20) -> Portion | None:
        """The oldest frames that are not released, about ``most_bytes`` of them; None if there are none.

        If a segment cannot be read any further, its rest counts as dropped; as one record if an earlier process wrote
        it.

        Raises:
            OSError: If this process has too many files open.
        """
        with self._working():
            while self._segments:
                segment = self._segments[0]
                if segment.rest_bytes > 0:
                    portion = self._portion(segment, most_bytes)
                    if portion is not None:
                        self._reading = segment.number
                        return portion
                    self._count_lost(segment)
                self._segments.popleft().remove()
            if self._spilled:
                self._reading_spilled = len(self._spilled)
                return Portion(tuple(frame for frame, _ in self._spilled), -1, len(self._spilled))
            return None

    def release(self, portion: Portion) -> None:
        """Notes that these frames are delivered."""
        with self._lock:
            self._reading = None
            if portion.segment < 0:
                self._reading_spilled = 0
                for _ in range(portion.end):
                    self._spilled_bytes -= self._spilled.popleft()[1]
            elif self._segments and self._segments[0].number == portion.segment:
                self._segments[0].released_bytes = portion.end
                self._segments[0].count(portion.frames, -1)
            if self._claim is not None and not self._pending():
                # The state of the destination is noted with the next frames.
                self._vacate()
                return
            is_noted = self._note_delivered()
            if self._segments and self._segments[0].rest_bytes <= 0:
                self._segments.popleft().remove()
                # A full disk has room now. Anchors older than the oldest segment would hide some frames.
                if not is_noted:
                    self._note_delivered()

    def drop_oldest(self) -> bool:
        """Drops the oldest segment that is not being delivered, but for what must be kept; False if there is none."""
        with self._working():
            return any(segment.number != self._reading and self._drop(segment) for segment in self._segments)

    def count_dropped(self, frame: StagedFrame) -> None:
        """Counts a frame as dropped."""
        self.dropped_points += frame.points
        self.dropped_records += frame.records

    def close(self) -> bool:
        """Gives the folder up, and removes it if everything in it is delivered; returns whether it is.

        Does nothing in a forked child: the folder is the parent's, and its lock may be held forever.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            self._closed = True
            try:
                is_empty = not self._pending()
                if is_empty:
                    remove_staging(self.folder)
                return is_empty
            finally:
                self._give_up_claim()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Holds the lock, and reports afterwards what has failed."""
        fault: OSError | None = None
        try:
            with self._lock:
                try:
                    yield
                finally:
                    fault, self._unreported = self._unreported, None
        finally:
            if fault is not None and self._on_fault is not None:
                self._on_fault(fault)

    def _failed(self, error: OSError) -> None:
        if not self._is_faulty:
            self._is_faulty, self._unreported = True, error

    def _give_up_claim(self) -> None:
        if self._claim is not None:
            self._claim.give_up()

    def _pending(self) -> int:
        return sum(segment.rest_bytes for segment in self._segments) + self._spilled_bytes

    def _write(self, data: bytes, frames: Sequence[StagedFrame]) -> None:
        segment = self._segments[-1] if self._segments else None
        # Nothing would be found after an incomplete frame of an earlier process.
        if segment is None or segment.number <= self._found or segment.size_bytes >= _SEGMENT_BYTES:
            segment = self._next_segment()
        try:
            segment.append(data)
        except FileNotFoundError:
            # It is removed: by us if it was empty, and permanently after the end.
            if self._closed:
                raise
            segment = self._next_segment()
            # First, so that a recovery does not look for these frames in what storage already has.
            self._note_delivered()
            keep_staging(self.folder, self._claim, self._manifest)
            segment.append(data)
        segment.count(frames)
        self._is_faulty = False

    def _next_segment(self) -> Segment:
        self._number += 1
        self._segments.append(Segment(self.folder, self._number))
        return self._segments[-1]

    def _spill(self, frames: Sequence[StagedFrame]) -> None:
        for frame in frames:
            size = len(frame.body) + 200
            self._spilled.append((frame, size))
            self._spilled_bytes += size
        if self._spilled_bytes <= self._spill_bytes:
            return
        left: deque[tuple[StagedFrame, int]] = deque()
        for place, (frame, size) in enumerate(self._spilled):
            # Storage may have a part of those being delivered: a second attempt must begin with the same frames.
            if self._spilled_bytes <= self._spill_bytes or frame.keep or place < self._reading_spilled:
                left.append((frame, size))
            else:
                self._spilled_bytes -= size
                self.count_dropped(frame)
        self._spilled = left

    def _unspill(self) -> bool:
        """Writes what could not be written before, unless it is being delivered; returns whether it could."""
        if self._reading_spilled or time.monotonic() < self._next_try_s:
            return False
        try:
            frames = [frame for frame, _ in self._spilled]
            self._write(b"".join(map(encode, frames)), frames)
        except OSError as error:
            self._failed(error)
            self._next_try_s = time.monotonic() + _TRY_AGAIN_S
            return False
        self._spilled.clear()
        self._spilled_bytes = 0
        return True

    def _portion(self, segment: Segment, most_bytes: int) -> Portion | None:
        try:
            return segment.read(most_bytes)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            self._failed(error)
            return None

    def _drop(self, segment: Segment) -> bool:
        before = segment.size_bytes
        try:
            portion = self._portion(segment, before)
            frames = portion.frames if portion is not None else ()
            kept = [frame for frame in frames if frame.keep]
            data = b"".join(map(encode, kept))
            if len(data) >= segment.rest_bytes:
                return False
            segment.replace_rest(data)
        except OSError as error:
            self._failed(error)
            return False
        segment.count(frames, -1)
        if portion is None or portion.end < before:
            self._count_lost(segment)
        for frame in frames:
            if not frame.keep:
                self.count_dropped(frame)
        segment.points = segment.records = 0
        segment.count(kept)
        return True

    def _count_lost(self, segment: Segment) -> None:
        """Counts what can no longer be read."""
        self.dropped_points += segment.points
        self.dropped_records += segment.records or not segment.points

    def note(self) -> None:
        """Writes the anchors; if nothing waits, with the next frames."""
        with self._lock:
            if self._claim is None or self._pending():
                self._note_delivered()

    def _vacate(self) -> None:
        if self._claim is not None and not self._closed and not self._pending():
            self._segments.clear()
            remove_staging(self.folder)

    def _note_delivered(self) -> bool:
        if self._claim is not None and not self._closed:
            with suppress(OSError):
                keep_staging(self.folder, self._claim, self._manifest)
        first = self._segments[0] if self._segments else Segment(self.folder, 0)
        return write_note(self.folder, Note(segment=first.number, released=first.released_bytes, anchors=self.anchors))

    def _load(self) -> None:
        """Takes over what an earlier process left in the folder."""
        note = read_note(self.folder)
        self.anchors = note.anchors
        self._segments.extend(find_segments(self.folder, note))
        last = self._segments[-1].number if self._segments else 0
        self._number = self._found = max(note.segment, last)
