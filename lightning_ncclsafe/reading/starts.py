"""The starts of a run in its logs, and how launchers report the ends of ranks: a restart goes on in the same files."""

import re
from dataclasses import dataclass, field, replace
from datetime import datetime

from lightning_ncclsafe.facts import ExceptionFacts, Statement, StatementKind
from lightning_ncclsafe.reading.bars import ProgressBar
from lightning_ncclsafe.reading.rank_log import Ended, RankLog
from lightning_ncclsafe.reading.statements import OF_EACH, WAITS
from lightning_ncclsafe.reading.values import MOST_RANKS, whole

_MOST_SAID = 100_000
_MOST_UNNAMED = 16
_MOST_STATEMENTS = 64
_MOST_LIMITS = 16
RANKS_OF_A_HOST = 8
"""Hardly any host has more processes than this, one for each GPU."""
# Clocks of hosts differ by less, and what follows from a failure may come as soon.
_LONG_S = 10
# What becomes of whoever ends well, or is ended by his launcher.
_NO_CAUSE = (0, -15)

WORDS = (
    "exitcode",
    "local_rank: ",
    "Root Cause (",
    "  host ",
    "  time      : ",
    "srun: error",
    "slurmstepd",
    "death signal",
    "SignalException",
    "will restart worker",
    "elastic",
)
"""Whatever says a thing that is read here has one of these in it."""

_FIRST = "Root Cause (first observed failure)"
_OF_SUMMARY = (_FIRST, "rank", "exitcode", "host ", "time ")
_FIELD = re.compile(
    rf"(?P<first>{re.escape(_FIRST)})|(?:^|(?<=\s))(?:time\s*:\s*(?P<time>\d{{4}}-\d\d-\d\d_\d\d:\d\d:\d\d)"
    r"|host\s*:\s*(?P<host>\S{1,100})|rank\s{0,20}:?\s{0,4}(?P<rank>\d+) \(local[_ ]rank: \d+\))"
    r"|\bexitcode\s*:\s*(?P<code>-?\d+) \(pid: \d+\)"
)
_SRUN = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<how>[A-Za-z ]+))"
)
_AGENT = re.compile(
    r"distributed[./]elastic[./](?:agent|rendezvous|multiprocessing[./]api)|distributed[./]run\b|\btorchrun\b"
)
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
        tasks: The ends of SLURM's tasks.
        statements: What logs say in so many words.
        bars: Progress bars that were seen once a rank had given up.
        limits_s: Timeouts of what was given up, seconds.
    """

    said: dict[int, RankLog] = field(default_factory=dict)
    unnamed: list[ExceptionFacts] = field(default_factory=list)
    world_size: int = 0
    tasks: list[Ended] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    bars: list[ProgressBar] = field(default_factory=list)
    limits_s: set[float] = field(default_factory=set)

    @property
    def tells(self) -> bool:
        """Whether any rank is said to wait, to fail or to end."""
        return bool(self.unnamed or self.statements or self.tasks) or any(one.tells for one in self.said.values())

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

    def has_ended(self, task: Ended) -> None:
        """Keeps the end of a task of SLURM's."""
        if len(self.tasks) < _MOST_SAID:
            self.tasks.append(task)

    def settled(self, *, has_agents: bool) -> dict[int, RankLog]:
        """What is said of each rank, with the ends of processes of which it follows which rank they were.

        Args:
            has_agents: Whether torchrun has started the ranks: then a task of SLURM's is none.
        """
        has_table = any(one.exit_code is not None for one in self.said.values())
        ends = [one for one in self.statements if one.kind is StatementKind.ENDED and one.exit_code is not None]
        may_be_first = not any(_is_fatal(one.exit_code) for one in ends if one.detail == OF_EACH)
        for statement in ends:
            rank = self._rank_of(statement)
            said = self.of(rank) if rank is not None else None
            if said is not None or (has_table and statement.detail == "torchrun"):
                self.statements.remove(statement)
            if said is not None and not has_table:
                is_first = statement.detail != OF_EACH or (may_be_first and (statement.exit_code or 0) > 0)
                said.ended(Ended(said.rank, statement.exit_code or 0, is_first=is_first))
                said.quote(statement.line)
        self._settle_unexplained()
        self._settle_words_of_srun(has_agents=has_agents)
        if not has_agents:
            self._settle_tasks()
        self._find_first()
        self._attribute()
        return self.said

    def _settle_unexplained(self) -> None:
        """Of a process of which it is not said how it ended, the number may be known."""
        for at, one in enumerate(self.statements):
            rank = self._rank_of(one) if one.exit_code is None and one.local_rank is not None else None
            if rank is not None:
                self.statements[at] = replace(one, ranks=(rank,))

    def _settle_words_of_srun(self, *, has_agents: bool) -> None:
        """That a task was killed, as it is also said of all others once one has failed: of one alone it is said."""
        words = [at for at, one in enumerate(self.statements) if one.detail.startswith("srun ")]
        if has_agents or len(words) > 1:
            for at in words:
                self.statements[at] = replace(self.statements[at], ranks=())

    def _settle_tasks(self) -> None:
        """A task of SLURM's is a rank. Where the kernel has ended one, the others may have failed because of that."""
        may_be_first = not any(_is_fatal(task.exit_code) for task in self.tasks)
        for task in self.tasks:
            if (said := self.of(task.rank)) is not None:
                said.ended(task._replace(is_first=may_be_first))

    def _find_first(self) -> None:
        """Launchers of several hosts each report their own first; the one that was long before the others is."""
        first = [one for one in self.said.values() if one.ended_first]
        times = [one.ended_s for one in first if one.ended_s is not None]
        if len(times) == len(first) > 1:
            for one in first:
                one.ended_first = (one.ended_s or 0) < min(times) + _LONG_S

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

    def unsettled(self, *, has_agents: bool) -> tuple[Statement, ...]:
        """The statements of which it does not follow which rank they are about, and all others."""
        self.settled(has_agents=has_agents)
        return tuple(self.statements)

    def has_raised(self, exception: ExceptionFacts) -> None:
        """Keeps an exception of which no rank is known."""
        if len(self.unnamed) < _MOST_UNNAMED and exception not in self.unnamed:
            self.unnamed.append(exception)


class Starts:
    """All starts. Files number theirs alike: what one says of the second belongs to what another says of the second.

    Attributes:
        has_agents: Whether torchrun has started the ranks.
    """

    def __init__(self) -> None:
        self.has_agents = False
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


class Summary:
    """torchrun's summary, which has a line for each of time, host, rank and exit code; or all of them in one."""

    def __init__(self) -> None:
        self._host = ""
        self._rank: int | None = None
        self._at_s: float | None = None
        self._is_first = False

    def add(self, text: str) -> list[Ended]:
        """Reads the next line; the ends that this line completes."""
        if not any(word in text for word in _OF_SUMMARY):
            return []
        return [end for field in _FIELD.finditer(text) if (end := self._take(field)) is not None]

    def _take(self, field: re.Match[str]) -> Ended | None:
        if field["first"]:
            self._is_first = True
        elif field["time"]:
            self._at_s, self._rank = _seconds(field["time"]), None
        elif field["host"]:
            self._host, self._rank = field["host"], None
        elif field["rank"]:
            self._rank = whole(field["rank"], MOST_RANKS)
        elif self._rank is not None and self._rank < MOST_RANKS:
            ended = Ended(self._rank, whole(field["code"]), self._host, self._is_first, self._at_s)
            self._host, self._rank, self._at_s, self._is_first = "", None, None, False
            return ended
        return None


def _is_fatal(code: int | None) -> bool:
    """Whether a signal has ended a process, by its exit code or that of its shell; an abort is what ends who waits."""
    return code is not None and (code < 0 or 128 < code <= 192) and code not in (-6, -15, 134, 143)


def _seconds(words: str) -> float | None:
    """Of ``"2023-06-03_22:45:52"``, from any beginning."""
    try:
        return (datetime.fromisoformat(words.replace("_", "T")) - datetime(2000, 1, 1)).total_seconds()
    except ValueError:
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
    """The ends of tasks in a line of srun's: ``"srun: error: node-7: task 13: Out Of Memory"``."""
    found = _SRUN.search(text)
    if found is None:
        return []
    code = whole(found["code"]) if found["code"] else _SRUN_SIGNALS.get(found["how"].strip())
    return [Ended(task, code, found["host"][:100]) for task in _tasks(found["tasks"])] if code else []


def of_agents(text: str) -> bool:
    """Whether torchrun speaks here, which starts the ranks itself: SLURM's tasks are its agents then."""
    return _AGENT.search(text) is not None


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
