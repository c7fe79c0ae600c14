"""Ranks as threads of one process, that vote and gather as those of a job do."""

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import or_
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_S = 10.0


class Meeting:
    """What the ranks share. A vote or a gathering that not all ranks take part in fails."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.is_broken = False
        self.changed = threading.Condition()
        self.cast: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)


class ThreadVotes:
    """One rank's votes; counts how many it has started and how many it has waited for."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self.calls = 0

    def start(self, flags: int) -> Callable[[], int]:
        call = self._cast((flags,))
        return lambda: reduce(or_, (theirs for (theirs,) in self._all(call)))

    def gather(self, *values: int) -> list[list[int]]:
        return [list(row) for row in self._all(self._cast(values))]

    def _cast(self, values: tuple[int, ...]) -> int:
        call, self.calls = self.calls, self.calls + 1
        with self._meeting.changed:
            self._meeting.cast[call][self._rank] = tuple(map(int, values))
            self._meeting.changed.notify_all()
        return call

    def _all(self, call: int) -> list[tuple[int, ...]]:
        meeting = self._meeting
        with meeting.changed:
            meeting.changed.wait_for(lambda: len(meeting.cast[call]) == meeting.world_size or meeting.is_broken, WAIT_S)
            cast = meeting.cast[call]
            assert len(cast) == meeting.world_size, f"vote {call}: only ranks {sorted(cast)} took part"
            return [meeting.cast[call][rank] for rank in range(meeting.world_size)]


def as_ranks(world_size: int, body: Callable[[int, ThreadVotes], T]) -> list[T | Exception]:
    """What ``body(rank, votes)`` returns, or raises, in each rank."""
    meeting = Meeting(world_size)

    def run(rank: int) -> Any:
        try:
            return body(rank, ThreadVotes(meeting, rank))
        except Exception as error:
            with meeting.changed:
                meeting.is_broken = True
                meeting.changed.notify_all()
            return error

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(run, range(world_size)))
