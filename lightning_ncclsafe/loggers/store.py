"""Local staging: what a logger has accepted and its storage does not have yet, on a fast disk of this host."""

import errno
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ncclsafe.loggers.frames import Frame, decode, encode
from lightning_ncclsafe.loggers.manifest import MANIFEST, open_regular
from lightning_ncclsafe.loggers.staging import Claim, keep_staging

_DELIVERED = "delivered.json"
_SEGMENT_BYTES = 1 << 20
# How long after a full disk it is tried again: what waits in memory may be large.
_TRY_AGAIN_S = 5.0
_SUFFIX = ".frames"
# What a file that cannot be opened for these reasons holds is not lost: later it can.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)


@dataclass(slots=True)
class _Segment:
    """A file of frames.

    Attributes:
        number: Its place in the order.
        bytes: How long it is.
        released: How much of it, from its beginning, has been delivered.
        points: Points in the rest, as far as this process has written it.
        records: Everything else in the rest, as far as this process has written it.
    """

    number: int
    bytes: int = 0
    released: int = 0
    points: int = 0
    records: int = 0

    def add(self, frames: Sequence[Frame], times: int = 1) -> None:
        """Counts frames that have been added, or with ``times=-1`` taken away."""
        # Never below nothing: what an earlier process has left was not counted.
        self.points = max(self.points + times * sum(frame.points for frame in frames), 0)
        self.records = max(self.records + times * sum(frame.records for frame in frames), 0)


@dataclass(frozen=True, slots=True)
class Portion:
    """Frames that are read together and delivered together.

    Attributes:
        frames: The frames, in order.
        segment: Number of the segment they are in; -1 for those that could not be written down.
        end: Offset of their end in the segment; for those that could not be written down, their number.
    """

    frames: tuple[Frame, ...]
    segment: int
    end: int


class Store:
    """A folder of staged frames. Any thread may append; one reads and releases.

    Where the folder cannot be written to (a full disk), frames stay in memory, at most ``spill_bytes`` of them. If it
    was removed it is made again; what was in it is counted as dropped.

    Args:
        folder: The folder; made, readable for this user only.
        spill_bytes: Most bytes kept in memory while the folder cannot be written to.
        claim: The right to the folder, which is given up with the store.
        on_fault: Told of the first error of each row of failures, on the thread that came upon it.

    Attributes:
        dropped_points: Points that had to be dropped.
        dropped_records: Media, texts and the like that had to be dropped.
        anchors: What the last delivery has left in each file of the destination; kept across a crash.

    Raises:
        OSError: If the folder cannot be made.
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
        # What is to be said as soon as nobody has to wait for it.
        self._unsaid: OSError | None = None
        self._pid = os.getpid()
        self._closed = False
        self._spilled: deque[tuple[Frame, int]] = deque()
        self._spilled_bytes = 0
        self._next_try_s = 0.0
        self._segments: deque[_Segment] = deque()
        self._number = 0
        self._reading: int | None = None
        # How many of the spilled frames are being delivered.
        self._reading_spilled = 0
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._manifest = _read(folder / MANIFEST)
            self._load()
        except BaseException:
            self._give_up_claim()
            raise

    @property
    def pending_bytes(self) -> int:
        """How much waits to be delivered."""
        with self._lock:
            return self._pending()

    def append(self, frames: Sequence[Frame]) -> None:
        """Writes frames down, in one piece. They survive this process, not this host."""
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
        """The oldest frames that have not been released, about ``most_bytes`` of them; None if there are none.

        A segment that cannot be read any further is left behind, its rest counted as dropped: as one record where an
        earlier process has written it.

        Raises:
            OSError: If this process has too many files open just now.
        """
        with self._working():
            while self._segments:
                segment = self._segments[0]
                if segment.released < segment.bytes:
                    portion = self._portion(segment, most_bytes)
                    if portion is not None:
                        self._reading = segment.number
                        return portion
                    self._count_lost(segment)
                self._retire_first()
            if self._spilled:
                self._reading_spilled = len(self._spilled)
                return Portion(tuple(frame for frame, _ in self._spilled), -1, len(self._spilled))
            return None

    def release(self, portion: Portion) -> None:
        """These frames have been delivered."""
        with self._lock:
            self._reading = None
            if portion.segment < 0:
                self._reading_spilled = 0
                for _ in range(portion.end):
                    self._spilled_bytes -= self._spilled.popleft()[1]
            elif self._segments and self._segments[0].number == portion.segment:
                self._segments[0].released = portion.end
                self._segments[0].add(portion.frames, -1)
            is_noted = self._note_delivered()
            if self._segments and self._segments[0].released >= self._segments[0].bytes:
                self._retire_first()
                # On a full disk there is room now. Anchors older than the oldest segment would hide some of it.
                if not is_noted:
                    self._note_delivered()

    def drop_oldest(self) -> bool:
        """Drops the oldest segment that is not being delivered, but for what must be kept; False if there is none."""
        with self._working():
            return any(segment.number != self._reading and self._drop(segment) for segment in self._segments)

    def count_dropped(self, frame: Frame) -> None:
        """Counts a frame that was not to be staged, or not any more."""
        self.dropped_points += frame.points
        self.dropped_records += frame.records

    def close(self) -> bool:
        """Gives the folder up, and removes it if everything in it has been delivered; returns whether it has.

        In a child that was forked it does nothing: the folder is the parent's, and its lock may be held for ever.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            self._closed = True
            try:
                is_empty = not self._pending()
                if is_empty:
                    shutil.rmtree(self.folder, ignore_errors=True)
                return is_empty
            finally:
                self._give_up_claim()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Holds the lock, and says afterwards what has gone wrong."""
        fault: OSError | None = None
        try:
            with self._lock:
                try:
                    yield
                finally:
                    fault, self._unsaid = self._unsaid, None
        finally:
            if fault is not None and self._on_fault is not None:
                self._on_fault(fault)

    def _failed(self, error: OSError) -> None:
        if not self._is_faulty:
            self._is_faulty, self._unsaid = True, error

    def _give_up_claim(self) -> None:
        if self._claim is not None:
            self._claim.give_up()

    def _pending(self) -> int:
        return sum(segment.bytes - segment.released for segment in self._segments) + self._spilled_bytes

    def _write(self, data: bytes, frames: Sequence[Frame]) -> None:
        segment = self._segments[-1] if self._segments else None
        # Behind half a frame of an earlier process nothing would be found.
        if segment is None or segment.number <= self._found or segment.bytes >= _SEGMENT_BYTES:
            segment = self._next_segment()
        try:
            self._write_to(segment, data)
        except FileNotFoundError:
            # Somebody has removed it; after the end that was us.
            if self._closed:
                raise
            keep_staging(self.folder, self._claim, self._manifest)
            segment = self._next_segment()
            self._write_to(segment, data)
        segment.add(frames)
        self._is_faulty = False

    def _next_segment(self) -> _Segment:
        self._number += 1
        self._segments.append(_Segment(self._number))
        return self._segments[-1]

    def _write_to(self, segment: _Segment, data: bytes) -> None:
        # What was written before must still be there: behind nothing it would be looked for in the wrong place.
        makes = 0 if segment.bytes else os.O_CREAT
        # Not through a buffer: what is written here must outlive the process from now on.
        handle = os.open(self._path(segment), os.O_WRONLY | os.O_APPEND | makes, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
        except OSError:
            # Half a frame would hide those after it.
            os.ftruncate(handle, segment.bytes)
            raise
        finally:
            os.close(handle)
        segment.bytes += len(data)

    def _spill(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            size = len(frame.body) + 200
            self._spilled.append((frame, size))
            self._spilled_bytes += size
        if self._spilled_bytes <= self._spill_bytes:
            return
        left: deque[tuple[Frame, int]] = deque()
        for place, (frame, size) in enumerate(self._spilled):
            # Of those that are being delivered storage may have a part: a second try must begin with the same ones.
            if self._spilled_bytes <= self._spill_bytes or frame.keep or place < self._reading_spilled:
                left.append((frame, size))
            else:
                self._spilled_bytes -= size
                self.count_dropped(frame)
        self._spilled = left

    def _unspill(self) -> bool:
        """Writes down what could not be written before, unless it is being delivered; returns whether it could."""
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

    def _portion(self, segment: _Segment, most_bytes: int) -> Portion | None:
        try:
            with open(self._path(segment), "rb", opener=open_regular) as file:
                file.seek(segment.released)
                data = file.read(segment.bytes - segment.released)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            self._failed(error)
            return None
        frames: list[Frame] = []
        end = 0
        for frame, end in decode(data):
            frames.append(frame)
            if end >= most_bytes:
                break
        return Portion(tuple(frames), segment.number, segment.released + end) if frames else None

    def _retire_first(self) -> None:
        with suppress(OSError):
            os.unlink(self._path(self._segments.popleft()))

    def _drop(self, segment: _Segment) -> bool:
        try:
            portion = self._portion(segment, segment.bytes)
            frames = portion.frames if portion is not None else ()
            kept = b"".join(encode(frame) for frame in frames if frame.keep)
            if len(kept) >= segment.bytes - segment.released:
                return False
            self._rewrite(segment, kept)
        except OSError as error:
            self._failed(error)
            return False
        segment.add(frames, -1)
        if portion is None or portion.end < segment.bytes:
            self._count_lost(segment)
        for frame in frames:
            if not frame.keep:
                self.count_dropped(frame)
        segment.bytes = segment.released + len(kept)
        segment.points = segment.records = 0
        segment.add([frame for frame in frames if frame.keep])
        return True

    def _count_lost(self, segment: _Segment) -> None:
        """Counts what cannot be read any more."""
        self.dropped_points += segment.points
        self.dropped_records += segment.records or not segment.points

    def _rewrite(self, segment: _Segment, data: bytes) -> None:
        temporary = self._path(segment).with_suffix(".tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "wb") as file:
            # A hole takes the place of what has been delivered: what is noted about it stays true.
            file.truncate(segment.released)
            file.seek(segment.released)
            file.write(data)
        os.replace(temporary, self._path(segment))

    def note(self) -> None:
        """Writes the anchors down."""
        with self._lock:
            self._note_delivered()

    def _note_delivered(self) -> bool:
        if self._claim is not None and not self._closed:
            with suppress(OSError):
                keep_staging(self.folder, self._claim, self._manifest)
        segment = self._segments[0] if self._segments else None
        noted = {
            "segment": segment.number if segment else 0,
            "released": segment.released if segment else 0,
            "anchors": self.anchors,
        }
        # Without it a recovery compares with what the storage has; the run itself does not need it.
        with suppress(OSError):
            temporary = self.folder / f"{_DELIVERED}.tmp"
            temporary.write_text(json.dumps(noted))
            os.replace(temporary, self.folder / _DELIVERED)
            return True
        return False

    def _load(self) -> None:
        """Takes over what an earlier process has left in the folder."""
        noted = _read_json(self.folder / _DELIVERED)
        anchors = noted.get("anchors")
        found = anchors.items() if isinstance(anchors, dict) else ()
        self.anchors = {file: anchor for file, anchor in found if isinstance(anchor, dict)}
        first, released = _count(noted, "segment"), _count(noted, "released")
        numbers = sorted(int(path.stem) for path in self.folder.glob(f"*{_SUFFIX}") if path.stem.isdigit())
        for segment in map(_Segment, (number for number in numbers if number >= first)):
            segment.bytes = self._path(segment).stat().st_size
            segment.released = min(released, segment.bytes) if segment.number == first else 0
            self._segments.append(segment)
        self._number = self._found = max([first, *numbers])

    def _path(self, segment: _Segment) -> Path:
        return self.folder / f"{segment.number:08d}{_SUFFIX}"


def _read(path: Path) -> bytes:
    """What is in a small file; nothing if there is none."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read()
    except OSError:
        return b""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(noted: dict[str, Any], name: str) -> int:
    count = noted.get(name)
    return count if isinstance(count, int) and count >= 0 else 0
