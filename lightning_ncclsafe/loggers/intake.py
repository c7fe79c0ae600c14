"""What the training thread hands over: a queue bounded in bytes, from which nothing is dropped uncounted."""

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from lightning_ncclsafe.loggers.thinning import Scalars, Thinner
from lightning_ncclsafe.settings import Overflow

# What an entry costs beside its data, and a scalar beside its tag; a little more than Python takes.
_ENTRY_BYTES = 400
_SCALAR_BYTES = 120
# Of a queue that is full of scalars, a pass leaves at most about half.
_MOST_COARSE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that is made later, with its arguments as they were.

    Attributes:
        name: The method's name.
        args: Positional arguments, copied.
        kwargs: Keyword arguments, copied.
        created: Wall-clock time of the call, seconds since the epoch.
        data_bytes: How much memory the arguments hold.
        keep: Whether it must never be dropped.
        is_media: Whether it is encoded aside, as images and histograms are.
        events: CUDA events to wait for before the arguments can be read.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any]
    created: float
    data_bytes: int = 0
    keep: bool = False
    is_media: bool = False
    events: tuple[Any, ...] = ()

    @property
    def is_marker(self) -> bool:
        """Whether it is :data:`MARKER`."""
        return not self.name


Entry = Scalars | Call

MARKER = Call(name="", kwargs={}, created=0.0, keep=True)
"""Nothing but an end: what waits for the end of its window is not to wait any more."""


class Intake:
    """A queue from the training thread to those that write; media have a line of their own.

    Args:
        limit_bytes: Most bytes that wait in it.
        overflow: What happens beyond: ``"thin"``, ``"drop_oldest"`` or ``"block"``.
        block_s: How long a call waits for room with ``"block"``, seconds; then points are thinned.

    Attributes:
        thinned: Points that were left out, others standing for them.
        dropped_points: Points that were dropped.
        dropped_records: Calls that were dropped.
    """

    def __init__(self, limit_bytes: int, overflow: Overflow, block_s: float) -> None:
        self.thinned = 0
        self.dropped_points = 0
        self.dropped_records = 0
        self._limit_bytes = limit_bytes
        self._overflow = overflow
        self._block_s = block_s
        self._entries: deque[Entry] = deque()
        self._media: deque[Call] = deque()
        self._bytes = 0
        # Taken out, and not yet done with.
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait, or are being worked on."""
        return self._bytes + self._held_bytes

    @property
    def is_closed(self) -> bool:
        """Whether nobody waits here any more."""
        return self._closed

    def put(self, entry: Entry) -> None:
        """Takes an entry. Blocks only with ``"block"``, and for no longer than was said."""
        size = size_of(entry)
        with self._changed:
            # Nothing makes way for what would not fit all the same.
            if not self._has_room(size) and size <= self._limit_bytes:
                if self._overflow == "block" and not entry_is_kept(entry):
                    self._changed.wait_for(lambda: self._has_room(size) or self._closed, self._block_s)
                self._make_room(size)
            if not self._has_room(size) and not entry_is_kept(entry):
                self._count_dropped(entry)
                return
            line: deque[Any] = self._media if isinstance(entry, Call) and entry.is_media else self._entries
            line.append(entry)
            self._bytes += size
            # Whoever waits for the first takes those behind it, too.
            if len(line) == 1:
                self._changed.notify_all()

    def mark(self) -> None:
        """Puts :data:`MARKER` at the end."""
        with self._changed:
            self._entries.append(MARKER)
            self._bytes += size_of(MARKER)
            self._changed.notify_all()

    def take(self) -> list[Entry]:
        """Everything but media, at once; held until it is given back with :meth:`done`."""
        with self._changed:
            taken = list(self._entries)
            self._entries.clear()
            self._hold(taken)
            return taken

    def take_media(self) -> Call | None:
        """The next of the media, waited for; None once the intake is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._media or self._closed)
            if not self._media:
                return None
            call = self._media.popleft()
            self._hold([call])
            return call

    def done(self, entries: list[Entry]) -> None:
        """These have been worked on."""
        with self._changed:
            self._held_bytes -= sum(map(size_of, entries))
            self._changed.notify_all()

    def wait_for_entries(self, timeout_s: float | None) -> bool:
        """Waits until there is something other than media, or the time is over; False once all is taken and closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._closed, timeout_s)
            return bool(self._entries) or not self._closed

    def wait_until_empty(self, deadline: float) -> bool:
        """Waits until all has been worked on; False at the deadline (seconds of the monotonic clock)."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._entries and not self._media and not self._held_bytes,
                max(deadline - time.monotonic(), 0.0),
            )

    def close(self) -> None:
        """Nobody waits here any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return self._bytes + self._held_bytes + size <= self._limit_bytes

    def _hold(self, taken: list[Any]) -> None:
        size = sum(map(size_of, taken))
        self._bytes -= size
        self._held_bytes += size

    def _make_room(self, size: int) -> None:
        room = self._limit_bytes - self._held_bytes
        if self._has_room(size) or size > room:
            return
        # Down to half of what the queue may have, so that a full one does not do this for every entry.
        goal = min(room // 2, room - size)
        if self._overflow != "drop_oldest":
            self._thin(goal)
        self._drop_from(self._media, goal)
        self._drop_from(self._entries, goal)

    def _thin(self, goal: int) -> None:
        for coarseness in range(1, _MOST_COARSE):
            scalars = sum(size_of(entry) for entry in self._entries if isinstance(entry, Scalars))
            # Where it is not the scalars that fill the queue, they do not make way.
            if self._bytes <= goal or scalars <= goal // 2:
                return
            thinner = Thinner()
            thinner.coarseness = coarseness
            self._entries = deque(_thinned(thinner, self._entries))
            self._bytes = sum(map(size_of, self._entries)) + sum(map(size_of, self._media))
            self.thinned += thinner.thinned

    def _drop_from(self, line: deque[Any], goal: int) -> None:
        kept = []
        while line and self._bytes > goal:
            entry = line.popleft()
            if entry_is_kept(entry):
                kept.append(entry)
            else:
                self._bytes -= size_of(entry)
                self._count_dropped(entry)
        line.extendleft(reversed(kept))

    def _count_dropped(self, entry: Entry) -> None:
        if isinstance(entry, Scalars):
            self.dropped_points += len(entry.values)
        else:
            self.dropped_records += 1


def size_of(entry: Entry) -> int:
    """About how much memory an entry takes."""
    if isinstance(entry, Scalars):
        return _ENTRY_BYTES + _SCALAR_BYTES * len(entry.values)
    return _ENTRY_BYTES + entry.data_bytes


def entry_is_kept(entry: Entry) -> bool:
    """Whether an entry must never be dropped."""
    return isinstance(entry, Call) and entry.keep


def _thinned(thinner: Thinner, entries: deque[Entry]) -> list[Entry]:
    """The same entries in the same order, with fewer points."""
    left: list[Scalars] = []
    for place, entry in enumerate(entries):
        if isinstance(entry, Scalars):
            # Its place is all that has to be known of it: windows end in another order than they began.
            left += thinner.offer(replace(entry, step=place), 0.0)
    tags: dict[int | None, set[str]] = {}
    for scalars in [*left, *thinner.rest()]:
        tags.setdefault(scalars.step, set()).update(scalars.values)
    return [
        replace(entry, values={tag: value for tag, value in entry.values.items() if tag in tags[place]})
        if isinstance(entry, Scalars)
        else entry
        for place, entry in enumerate(entries)
        if place in tags or not isinstance(entry, Scalars)
    ]
