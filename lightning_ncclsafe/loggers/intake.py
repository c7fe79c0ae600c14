"""What the training thread hands over: a queue bounded in bytes, which drops nothing uncounted."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from lightning_ncclsafe.settings import Overflow

# Points that are left of each window: the smallest, the largest and the last.
_LEFT = 3
# How long a window that closes by its number of points may stay open, for each step of coarseness.
_LONGEST_S = 0.5
# Memory of an entry without its data, and of a scalar without its tag; a little more than Python needs.
_ENTRY_BYTES = 400
_SCALAR_BYTES = 120
# Each pass leaves at most about half of a queue that is full of scalars.
_MOST_COARSE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedScalars:
    """What one call logs.

    Attributes:
        step: The step, as given.
        values: Value by tag.
        created: Wall-clock time of the call, seconds since the epoch.
    """

    keep: ClassVar[bool] = False
    is_media: ClassVar[bool] = False

    step: int | None
    values: dict[str, float]
    created: float

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return _ENTRY_BYTES + _SCALAR_BYTES * len(self.values)


@dataclass(slots=True)
class _TagWindow:
    opened: float
    # The points that represent the window, each with its place in the order of arrival.
    smallest: tuple[int, LoggedScalars]
    largest: tuple[int, LoggedScalars]
    last: tuple[int, LoggedScalars]
    seen: int = 0


class Thinner:
    """Lets scalar points through, or only the smallest, the largest and the last of each tag's window.

    This is M4 aggregation (Jugel et al., VLDB 2014): a line through these points has the outline of the line through
    all. NaN counts as the smallest.

    Args:
        max_points_per_s: Most points of a tag per second, on average; None for no limit. Points wait for the end of
            their window, which lasts ``3 / max_points_per_s`` seconds.

    Attributes:
        coarseness: A window also stays open until it has ``3 * 2**coarseness`` points; 0 lets all through.
        thinned: Points that were left out.
    """

    def __init__(self, max_points_per_s: float | None = None) -> None:
        self._window_s = _LEFT / max_points_per_s if max_points_per_s else 0.0
        self._windows: dict[str, _TagWindow] = {}
        self._arrived = 0
        self.coarseness = 0
        self.thinned = 0

    @property
    def idle(self) -> bool:
        """Whether no point waits for the end of its window."""
        return not self._windows

    def offer(self, scalars: LoggedScalars, now: float) -> list[LoggedScalars]:
        """Takes what was logged and returns what may pass, in the order of arrival."""
        if not self.coarseness and not self._window_s and not self._windows:
            return [scalars]
        self._arrived += 1
        place = (self._arrived, scalars)
        closed: list[tuple[str, _TagWindow]] = []
        for tag, value in scalars.values.items():
            window = self._windows.setdefault(tag, _TagWindow(now, place, place, place))
            window.seen += 1
            window.last = place
            if _below(value, window.smallest[1].values[tag]):
                window.smallest = place
            if _below(window.largest[1].values[tag], value):
                window.largest = place
            has_enough = not self.coarseness or window.seen >= _LEFT * 2**self.coarseness
            if has_enough and now - window.opened >= self._window_s:
                closed.append((tag, self._windows.pop(tag)))
        return self._left_of(closed)

    def due(self, now: float) -> list[LoggedScalars]:
        """The points of windows that have been open for as long as they may."""
        longest_s = max(self._window_s, _LONGEST_S * 2**self.coarseness)
        over = [tag for tag, window in self._windows.items() if now - window.opened >= longest_s]
        return self._left_of([(tag, self._windows.pop(tag)) for tag in over])

    def rest(self) -> list[LoggedScalars]:
        """The points of all open windows."""
        windows, self._windows = self._windows, {}
        return self._left_of(windows.items())

    def _left_of(self, windows: Iterable[tuple[str, _TagWindow]]) -> list[LoggedScalars]:
        """The points that represent these windows, those of one call together again."""
        chosen: dict[int, tuple[LoggedScalars, dict[str, float]]] = {}
        for tag, window in windows:
            places = dict((window.smallest, window.largest, window.last))
            self.thinned += window.seen - len(places)
            for number, scalars in places.items():
                chosen.setdefault(number, (scalars, {}))[1][tag] = scalars.values[tag]
        # No two have the same number, so nothing else is compared.
        return [replace(scalars, values=values) for _, (scalars, values) in sorted(chosen.items())]


def _below(one: float, other: float) -> bool:
    # Only NaN differs from itself; math.isnan does not accept an integer that no float can hold.
    return one != one or one < other


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """A call to make later, with its arguments as they were.

    Attributes:
        name: The method's name.
        args: Positional arguments, copied.
        kwargs: Keyword arguments, copied.
        created: Wall-clock time of the call, seconds since the epoch.
        data_bytes: Memory of the arguments.
        keep: Whether it must never be dropped.
        is_media: Whether it is encoded on a separate thread, as images and histograms are.
        events: CUDA events to wait for before reading the arguments.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    data_bytes: int = 0
    keep: bool = False
    is_media: bool = False
    events: tuple[Any, ...] = ()

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return _ENTRY_BYTES + self.data_bytes


Entry = LoggedScalars | LoggedCall


MARKER = LoggedCall(name="", keep=True)
"""A mark in the queue: points before it no longer wait for the end of their window."""


class Intake:
    """A queue from the training thread to the threads that stage; media have a queue of their own.

    Args:
        limit_bytes: Most bytes that wait in it.
        overflow: What happens beyond that: ``"thin"``, ``"drop_oldest"`` or ``"block"``.
        block_s: How long a call waits for room with ``"block"``, seconds; after that, points are thinned.

    Attributes:
        thinned: Points that were left out, represented by others.
        dropped_points: Points that were dropped.
        dropped_records: Calls that were dropped.
        is_closed: Whether all waiting has ended.
    """

    def __init__(self, limit_bytes: int, overflow: Overflow, block_s: float) -> None:
        self.thinned = 0
        self.dropped_points = 0
        self.dropped_records = 0
        self._limit_bytes = limit_bytes
        self._overflow = overflow
        self._block_s = block_s
        self._entries: deque[Entry] = deque()
        self._media: deque[LoggedCall] = deque()
        self._bytes = 0
        # Taken out, but not done yet.
        self._held_bytes = 0
        self._changed = threading.Condition()
        self.is_closed = False

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait or are being staged."""
        return self._bytes + self._held_bytes

    def put(self, entry: Entry) -> None:
        """Takes an entry. Blocks only with ``"block"``, and no longer than set."""
        size = entry.size_bytes
        with self._changed:
            # Nothing is dropped for what would not fit anyway.
            if not self._has_room(size) and size <= self._limit_bytes:
                if self._overflow == "block" and not entry.keep:
                    self._changed.wait_for(lambda: self._has_room(size) or self.is_closed, self._block_s)
                self._make_room(size)
            if not self._has_room(size) and not entry.keep:
                self._count_dropped(entry)
                return
            line: deque[Any] = self._media if entry.is_media else self._entries
            line.append(entry)
            self._bytes += size
            # The thread that waits for the first entry takes those behind it, too.
            if len(line) == 1:
                self._changed.notify_all()

    def mark(self) -> None:
        """Puts :data:`MARKER` at the end."""
        with self._changed:
            self._entries.append(MARKER)
            self._bytes += MARKER.size_bytes
            self._changed.notify_all()

    def take(self) -> list[Entry]:
        """Takes everything but media; its memory counts until :meth:`done`."""
        with self._changed:
            taken = list(self._entries)
            self._entries.clear()
            self._hold(taken)
            return taken

    def take_media(self) -> LoggedCall | None:
        """Waits for the next of the media and takes it; None once the intake is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._media or self.is_closed)
            if not self._media:
                return None
            call = self._media.popleft()
            self._hold([call])
            return call

    def done(self, entries: list[Entry]) -> None:
        """Notes that these are staged."""
        with self._changed:
            self._held_bytes -= _bytes_of(entries)
            self._changed.notify_all()

    def wait_for_entries(self, timeout_s: float | None) -> bool:
        """Waits for an entry other than media, or until the time is over; False once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self.is_closed, timeout_s)
            return bool(self._entries) or not self.is_closed

    def wait_until_empty(self, deadline: float) -> bool:
        """Waits until everything is staged; False at the deadline (seconds of the monotonic clock)."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._entries and not self._media and not self._held_bytes,
                max(deadline - time.monotonic(), 0.0),
            )

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return self._bytes + self._held_bytes + size <= self._limit_bytes

    def _hold(self, taken: list[Any]) -> None:
        size = _bytes_of(taken)
        self._bytes -= size
        self._held_bytes += size

    def _make_room(self, size: int) -> None:
        room = self._limit_bytes - self._held_bytes
        if self._has_room(size) or size > room:
            return
        # Down to half of the limit, so that a full queue does not do this for every entry.
        goal = min(room // 2, room - size)
        if self._overflow != "drop_oldest":
            self._thin(goal)
        self._drop_from(self._media, goal)
        self._drop_from(self._entries, goal)

    def _thin(self, goal: int) -> None:
        for coarseness in range(1, _MOST_COARSE):
            scalars_bytes = _bytes_of(entry for entry in self._entries if isinstance(entry, LoggedScalars))
            # Scalars are not thinned if something else fills the queue.
            if self._bytes <= goal or scalars_bytes <= goal // 2:
                return
            thinner = Thinner()
            thinner.coarseness = coarseness
            self._entries = deque(_thinned(thinner, self._entries))
            self._bytes = _bytes_of(self._entries) + _bytes_of(self._media)
            self.thinned += thinner.thinned

    def _drop_from(self, line: deque[Any], goal: int) -> None:
        kept = []
        while line and self._bytes > goal:
            entry = line.popleft()
            if entry.keep:
                kept.append(entry)
            else:
                self._bytes -= entry.size_bytes
                self._count_dropped(entry)
        line.extendleft(reversed(kept))

    def _count_dropped(self, entry: Entry) -> None:
        if isinstance(entry, LoggedScalars):
            self.dropped_points += len(entry.values)
        else:
            self.dropped_records += 1


def _bytes_of(entries: Iterable[Entry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _thinned(thinner: Thinner, entries: deque[Entry]) -> list[Entry]:
    """The same entries in the same order, with fewer points."""
    left: list[LoggedScalars] = []
    for place, entry in enumerate(entries):
        if isinstance(entry, LoggedScalars):
            # Its place identifies it: windows do not end in the order in which they began.
            left += thinner.offer(replace(entry, step=place), 0.0)
    tags: dict[int | None, set[str]] = {}
    for scalars in [*left, *thinner.rest()]:
        tags.setdefault(scalars.step, set()).update(scalars.values)
    return [
        replace(entry, values={tag: value for tag, value in entry.values.items() if tag in tags[place]})
        if isinstance(entry, LoggedScalars)
        else entry
        for place, entry in enumerate(entries)
        if place in tags or not isinstance(entry, LoggedScalars)
    ]
