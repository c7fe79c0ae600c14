"""The starts of a run in its logs, and how launchers report the ends of ranks: a restart goes on in the same files."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import ExceptionFacts, Statement, StatementKind
from lightning_ncclsafe.reading.rank_log import RankLog
from lightning_ncclsafe.reading.statements import WAITS
from lightning_ncclsafe.reading.values import MOST_RANKS, whole

_MOST_SAID = 100_000
_MOST_UNNAMED = 16
_MOST_STATEMENTS = 64
_MOST_LIMITS = 16
RANKS_OF_A_HOST = 8
"""Hardly any host has more processes than this, one for each GPU."""
# What becomes of whoever ends well, or is ended by his launcher.
_NO_CAUSE = (0, -15)

_FIRST = "Root Cause (first observed failure)"
_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)")
_HOST = re.compile(r"^\s*host\s*:\s*(\S{1,100})")
_EXIT = re.compile(r"^\s*exitcode\s*:\s*(-?\d+) \(pid: \d+\)")
_SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>[A-Za-z ]+)")
_CHILD = re.compile(r"\[rank: (\d+)\] Child process with PID (\d+) terminated with code (-?\d+)")
_ENDINGS = (
    (
        re.compile(r"Received (?:15|Signals\.SIGTERM) death signal|SignalException: Process \d+ got signal: 15"),
        "A launcher received SIGTERM, from a scheduler or from whoever stopped the job.",
    ),
    (re.compile(r"CANCELLED AT \S{1,40} DUE TO TIME LIMIT"), "SLURM ended the job because its time was up."),
    (re.compile(r"CANCELLED AT \S{1,40} DUE TO PREEMPTION"), "SLURM ended the job for another one (preemption)."),
    (re.compile(r"DUE TO NODE FAILURE|NODE_FAIL"), "SLURM reports a node failure."),
)
# What becomes of a process that waits: the watchdog's abort, and whoever ends it after that.
_FOLLOWS = (0, -6, -15)
# What srun's words mean as an exit code; "Killed" and "Aborted" are what becomes of all others.
_SRUN_SIGNALS = {"Out Of Memory": -9, "Segmentation fault": -11, "Bus error": -7}


@dataclass(slots=True)
class Start:
    """What logs say of one start.

    Attributes:
        said: What was said of each rank, by rank.
        unnamed: Exceptions of which no rank is known.
        world_size: The number of ranks by a log's own word; 0 where it says nothing of that.
        statements: What logs say in so many words.
        bars: Progress bars that were seen once a rank had given up.
        limits_s: Timeouts of what was given up, seconds.
    """

    said: dict[int, RankLog] = field(default_factory=dict)
    unnamed: list[ExceptionFacts] = field(default_factory=list)
    world_size: int = 0
    statements: list[Statement] = field(default_factory=list)
    bars: list[Any] = field(default_factory=list)
    limits_s: set[float] = field(default_factory=set)

    @property
    def tells(self) -> bool:
        """Whether any rank is said to wait, to fail or to end."""
        return bool(self.unnamed or self.statements) or any(one.tells for one in self.said.values())

    def of(self, rank: int) -> RankLog | None:
        """What is said of a rank; None where there is no room for more."""
        if rank not in self.said and len(self.said) >= _MOST_SAID:
            return None
        return self.said.setdefault(rank, RankLog(rank))

    def has_said(self, statement: Statement) -> None:
        """Keeps a statement; what is said twice counts once."""
        if statement.kind is StatementKind.ENDED and statement.exit_code in _NO_CAUSE:
            return
        if statement.kind is StatementKind.STORE_WAIT and statement.detail[4:5].isdecimal():
            self.has_limit(int(statement.detail.split()[1]) / 1e3)
        known = {(one.kind, one.ranks, one.by, one.exit_code, one.local_rank, one.detail) for one in self.statements}
        key = statement.kind, statement.ranks, statement.by, statement.exit_code, statement.local_rank, statement.detail
        if len(self.statements) < _MOST_STATEMENTS and key not in known:
            self.statements.append(statement)

    def has_joined(self) -> None:
        """All ranks have come to the store: who has waited for them there no longer does."""
        self.statements = [one for one in self.statements if one.detail != WAITS]

    def has_limit(self, limit_s: float) -> None:
        """Keeps a timeout that is over."""
        if len(self.limits_s) < _MOST_LIMITS:
            self.limits_s.add(limit_s)

    @property
    def settled(self) -> dict[int, RankLog]:
        """What is said of each rank, with the ends of processes of which it follows which rank they were."""
        has_table = any(one.exit_code is not None for one in self.said.values())
        for statement in [one for one in self.statements if one.kind is StatementKind.ENDED]:
            rank = self._rank_of(statement)
            said = self.of(rank) if rank is not None else None
            if said is not None or (has_table and statement.detail == "torchrun"):
                self.statements.remove(statement)
            if said is not None and statement.exit_code is not None and not has_table:
                said.ended(statement.exit_code, is_first=True)
                said.quote(statement.line)
        self._attribute()
        return self.said

    def _rank_of(self, statement: Statement) -> int | None:
        """The number within the only host is the rank."""
        if statement.ranks:
            return statement.ranks[0]
        highest = max([self.world_size, *(rank + 1 for rank in self.said)])
        return statement.local_rank if highest <= RANKS_OF_A_HOST else None

    def _attribute(self) -> None:
        """The only exception of an unknown rank is that of the only rank that ended by an unknown exception."""
        own = [one for one in self.unnamed if not one.is_consequence]
        first = [one for one in self.said.values() if one.ended_first and (one.exit_code or 0) > 0]
        if len(own) == len(first) == 1 and first[0].exception is None and not first[0].timeouts:
            first[0].raised(own[0])
            self.unnamed.remove(own[0])

    @property
    def unsettled(self) -> tuple[Statement, ...]:
        """The statements of which it does not follow which rank they are about, and all others."""
        _ = self.settled
        return tuple(self.statements)

    def has_raised(self, exception: ExceptionFacts) -> None:
        """Keeps an exception of which no rank is known."""
        if len(self.unnamed) < _MOST_UNNAMED and exception not in self.unnamed:
            self.unnamed.append(exception)


class Starts:
    """All starts. Files number theirs alike: what one says of the second belongs to what another says of the second."""

    def __init__(self) -> None:
        self._by_number: dict[int, Start] = {}
        self._number = 0
        self._world_size = 0

    def begin(self, number: int) -> None:
        """A file begins with the start of this number."""
        self._number = number

    def again(self) -> None:
        """The run starts again. Of those before, only the last one that tells anything may still be asked for."""
        told = self._last_told()
        self._by_number = {number: start for number, start in self._by_number.items() if number == told}
        self._number += 1

    @property
    def now(self) -> Start:
        """The one that is being read of."""
        return self._by_number.setdefault(self._number, Start())

    @property
    def last(self) -> Start:
        """The last one that tells anything."""
        return self._by_number.get(self._last_told(), Start())

    @property
    def world_size(self) -> int:
        """The number of ranks in the last one; of any, where that says nothing; 0 where none does."""
        return self.last.world_size or self._world_size

    def has_size(self, size: int) -> None:
        """Keeps the number of ranks."""
        self.now.world_size = max(self.now.world_size, size)
        self._world_size = max(self._world_size, size)

    def _last_told(self) -> int:
        return max((number for number, start in self._by_number.items() if start.tells), default=-1)


class Ended(NamedTuple):
    """How the process of a rank ended."""

    rank: int
    exit_code: int
    host: str = ""
    is_first: bool = False


class Summary:
    """torchrun's summary, which has a line for each of host, rank and exit code."""

    def __init__(self) -> None:
        self._host = ""
        self._rank: int | None = None
        self._is_first = False

    def add(self, text: str) -> Ended | None:
        """Reads the next line; an end where this line completes one."""
        if _FIRST in text:
            self._is_first = True
        elif host := _HOST.match(text):
            self._host, self._rank = host[1], None
        elif rank := _RANK.match(text):
            self._rank = whole(rank[1], MOST_RANKS)
        elif (code := _EXIT.match(text)) and self._rank is not None and self._rank < MOST_RANKS:
            ended = Ended(self._rank, whole(code[1]), self._host, self._is_first)
            self._host, self._rank, self._is_first = "", None, False
            return ended
        return None


def launcher_remark(text: str) -> str:
    """A sentence on what a launcher says of the job, or of a child that Lightning's has seen end; empty if none."""
    child = _CHILD.search(text)
    if child is not None and whole(child[3]) not in _FOLLOWS:
        # What it calls the rank is that within the host, which is the rank on the first host alone.
        who = f"its child process {child[2]}, local rank {child[1]}, was the first to exit"
        return f"Lightning reports that {who}, with code {child[3]}; the host is not named."
    return next((sentence for pattern, sentence in _ENDINGS if pattern.search(text)), "")


def starts_again(text: str) -> bool:
    """Whether torchrun says here that it starts all ranks again."""
    return "will restart worker group" in text


def has_started(text: str) -> bool:
    """Whether rank 0 says here, in Lightning's words, that all ranks have come: of a log that goes on, the next start.

    A process says so once, however many Trainers it makes.
    """
    return "All distributed processes registered. Starting with" in text


def srun_ended(text: str) -> list[Ended]:
    """The ends of ranks in a line of srun's: ``"srun: error: node-7: task 13: Out Of Memory"``."""
    found = _SRUN.search(text)
    code = _SRUN_SIGNALS.get(found["how"].strip()) if found else None
    if found is None or code is None:
        return []
    return [Ended(task, code, found["host"][:100]) for task in _tasks(found["tasks"])]


def _tasks(words: str) -> list[int]:
    """``[3, 8, 9]`` of ``"3,8-9"``."""
    tasks: list[int] = []
    for part in words.split(",")[:1000]:
        first, _, last = part.partition("-")
        low = whole(first, -1)
        high = whole(last, low) if last else low
        if 0 <= low <= high < MOST_RANKS:
            tasks += range(low, min(high, low + 1024) + 1)
    return tasks
