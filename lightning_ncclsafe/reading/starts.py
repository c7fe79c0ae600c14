"""The starts of a run, as a restart continues in the same logs, and how launchers report the ends of ranks."""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime

from lightning_ncclsafe.facts import ExceptionFacts, Statement, StatementKind
from lightning_ncclsafe.reading.bars import ProgressBar
from lightning_ncclsafe.reading.rank_log import Ended, RankLog
from lightning_ncclsafe.reading.statements import OF_EACH, WAITS
from lightning_ncclsafe.reading.values import MOST_RANKS, whole
from lightning_ncclsafe.reading.watchdog import Reported, TimedOut

_MOST_SAID = 100_000
_MOST_UNNAMED = 16
_MOST_STATEMENTS = 64
_MOST_LIMITS = 16
RANKS_OF_A_HOST = 8
"""Hosts hardly ever have more ranks than this, one for each GPU."""
# Clocks of hosts differ by less, and consequences of a failure may follow within this time.
_LONG_S = 10
# Hosts with several GPUs hardly ever have fewer: if the lowest rank that speaks is higher, it may be on another host.
_FEWEST_OF_A_HOST = 4
# Exit codes of processes that end well, or that their launcher ends.
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
    "Trainer.fit",
    " - CUDA_VISIBLE_DEVICES: [",
    "should dump",
    "distributed/run",
    "distributed.run",
    "nodes",
    "node_rank",
    "num_machines",
    "machine_rank",
)
"""Every line that is read here has one of these words."""

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
# What torchrun, DeepSpeed, Accelerate and Lightning are told, or print, about hosts
_HOSTS = re.compile(
    r"\b(?:nnodes|(?:min|max|num)_nodes|num_machines)\b['\"]?(?:\s{0,20}[=:]\s{0,4}|\s)['\"]?(?:\d+:)?(?P<number>\d+)"
    r"|\b(?:node|machine)_rank\b['\"]?(?:\s{0,20}[=:]\s{0,4}|\s)['\"]?(?P<rank>\d+)"
)
_CHILD = re.compile(r"\[rank: (\d+)\] Child process with PID (\d+) terminated with code (-?\d+)")
_ENDINGS = (
    (
        re.compile(r"Received (?:15|Signals\.SIGTERM) death signal|SignalException: Process \d+ got signal: 15"),
        "A launcher received SIGTERM, from a scheduler or a user.",
    ),
    (re.compile(r"CANCELLED AT \S{1,40} DUE TO TIME LIMIT"), "SLURM ended the job because its time was up."),
    (re.compile(r"CANCELLED AT \S{1,40} DUE TO PREEMPTION"), "SLURM ended the job for another one (preemption)."),
    (re.compile(r"DUE TO NODE FAILURE|NODE_FAIL|srun: error: Node failure on"), "SLURM reports a node failure."),
)
_BEGINS = re.compile(r"LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES: ")
_FINISHED = re.compile(r"`Trainer\.fit` stopped: `?(?P<why>max_(?:epochs|steps)=\d+)` reached")
_LOST_STORE = 'Failed to check the "should dump" flag'
# How waiting processes end: by the watchdog's abort, or by a launcher after that.
_FOLLOWS = (0, -6, -15)
# Exit codes for srun's words; "Killed" and "Aborted" are how all others end.
_SRUN_SIGNALS = {"Out Of Memory": -9, "Segmentation fault": -11, "Bus error": -7}


@dataclass(slots=True)
class Start:
    """What logs say about one start.

    Attributes:
        ranks: What was said about each rank, by rank.
        unnamed: Exceptions of unknown ranks.
        world_size: The number of ranks, if a log gives it; 0 otherwise.
        tasks: The ends of SLURM's tasks.
        statements: What logs state explicitly.
        bars: Progress bars seen after a rank had given up.
        limits_s: Timeouts of collectives that were given up, seconds.
        lost_store: Ranks that could no longer reach the store.
        reported: The last call of ranks by desync reports: number, operation, and the rank that reports it.
        finished: Why the last call of ``Trainer.fit`` has stopped on rank 0; empty if it has not.
    """

    ranks: dict[int, RankLog] = field(default_factory=dict)
    unnamed: list[ExceptionFacts] = field(default_factory=list)
    world_size: int = 0
    tasks: list[Ended] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    bars: list[ProgressBar] = field(default_factory=list)
    limits_s: set[float] = field(default_factory=set)
    lost_store: set[int] = field(default_factory=set)
    reported: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    finished: str = ""
    _may_be_elsewhere: bool = False

    @property
    def has_finding(self) -> bool:
        """Whether any rank waits, fails or ends, according to the log."""
        return bool(self.unnamed or self.statements or self.tasks or self.reported) or any(
            one.has_finding for one in self.ranks.values()
        )

    def of(self, rank: int) -> RankLog | None:
        """What is said about a rank; None if there are too many ranks."""
        if rank not in self.ranks and len(self.ranks) >= _MOST_SAID:
            return None
        return self.ranks.setdefault(rank, RankLog(rank))

    def add_statement(self, statement: Statement) -> None:
        """Keeps a statement, once."""
        if statement.kind is StatementKind.ENDED and statement.exit_code in _NO_CAUSE:
            return
        if statement.kind is StatementKind.STORE_WAIT and statement.detail[4:5].isdecimal():
            self.add_limit(int(statement.detail.split()[1]) / 1e3)
        known = {(one.kind, one.ranks, one.by, one.exit_code, one.local_rank, one.detail) for one in self.statements}
        key = statement.kind, statement.ranks, statement.by, statement.exit_code, statement.local_rank, statement.detail
        if len(self.statements) < _MOST_STATEMENTS and key not in known:
            self.statements.append(statement)

    def note_all_joined(self) -> None:
        """Notes that all ranks have joined the store: nobody waits there any more."""
        self.statements = [one for one in self.statements if one.detail != WAITS]

    def add_report(self, speaker: RankLog, reported: Reported) -> None:
        """Keeps what a desync report says about ranks, the operation included where it says that."""
        for rank in reported.ranks:
            if self.of(rank) is not None and (reported.op or rank not in self.reported):
                self.reported[rank] = reported.seq, reported.op, speaker.rank

    def add_limit(self, limit_s: float) -> None:
        """Keeps a timeout that has expired."""
        if len(self.limits_s) < _MOST_LIMITS:
            self.limits_s.add(limit_s)

    def add_task(self, task: Ended) -> None:
        """Keeps the end of a SLURM task."""
        if len(self.tasks) < _MOST_SAID:
            self.tasks.append(task)

    def settled(self, *, has_agents: bool, has_hosts: bool) -> dict[int, RankLog]:
        """What is said about each rank, with the ends of processes whose rank can be concluded.

        Statements about the end of such a process are dropped; those of no single rank are left.

        Args:
            has_agents: Whether torchrun has started the ranks, so that SLURM's tasks are not ranks.
            has_hosts: Whether the job has several hosts, so that the number of a process on its host is not its rank.
        """
        self._may_be_elsewhere = has_hosts or min(self.ranks, default=0) >= _FEWEST_OF_A_HOST
        has_table = any(one.exit_code is not None for one in self.ranks.values())
        ends = [one for one in self.statements if one.kind is StatementKind.ENDED and one.exit_code is not None]
        may_be_first = not any(_is_fatal(one.exit_code) for one in ends if one.detail == OF_EACH)
        for statement in ends:
            rank = self._rank_of(statement)
            rank_log = self.of(rank) if rank is not None else None
            if rank_log is not None or (has_table and statement.detail == "torchrun"):
                self.statements.remove(statement)
            if rank_log is not None and not has_table:
                is_first = statement.detail != OF_EACH or (may_be_first and (statement.exit_code or 0) > 0)
                rank_log.add_end(Ended(rank_log.rank, statement.exit_code or 0, is_first=is_first))
                rank_log.quote(statement.line)
        self._settle_reports()
        self._settle_unexplained()
        self._settle_words_of_srun(has_agents=has_agents)
        if not has_agents:
            self._settle_tasks()
        self._find_first()
        self._attribute()
        return self.ranks

    def _settle_reports(self) -> None:
        """Lets ranks that say nothing themselves wait where a desync report has them.

        It gives their last calls: whoever has called that number has called the lower one in which its writer waits.
        """
        own = {rank: self.ranks[rank].numbers for _, _, rank in self.reported.values()}
        known: dict[int, set[TimedOut]] = defaultdict(set)
        for rank_log in self.ranks.values():
            for call in rank_log.timeouts.values():
                known[call.seq].add(TimedOut(call.seq, call.op, call.takes, call.gives, 0, 0, None))
        for rank, (seq, op, speaker) in self.reported.items():
            rank_log = self.ranks[rank]
            if rank_log.timeouts or rank_log.standings or len(own[speaker]) > 1:
                continue
            number = min([*own[speaker], seq])
            call = TimedOut(number, op if number == seq else "", None, None, 0, 0, rank)
            if number < seq and len(known[number]) == 1:
                call = next(iter(known[number]))._replace(rank=rank)
            rank_log.add_timeout(call)
            if number in self.ranks[speaker].at:
                rank_log.at.setdefault(number, self.ranks[speaker].at[number])

    def _settle_unexplained(self) -> None:
        """Finds ranks of processes whose exit code is unknown."""
        for at, one in enumerate(self.statements):
            rank = self._rank_of(one) if one.exit_code is None and one.local_rank is not None else None
            if rank is not None:
                self.statements[at] = replace(one, ranks=(rank,))

    def _settle_words_of_srun(self, *, has_agents: bool) -> None:
        """Drops ranks where srun says that several tasks were killed, as it does once one has failed."""
        words = [at for at, one in enumerate(self.statements) if one.detail.startswith("srun ")]
        if has_agents or len(words) > 1:
            for at in words:
                self.statements[at] = replace(self.statements[at], ranks=())

    def _settle_tasks(self) -> None:
        """Takes SLURM's tasks as ranks. If the kernel has ended one, the others may have failed because of that."""
        may_be_first = not any(_is_fatal(task.exit_code) for task in self.tasks)
        for task in self.tasks:
            if (rank_log := self.of(task.rank)) is not None:
                rank_log.add_end(task._replace(is_first=may_be_first))

    def _find_first(self) -> None:
        """Each launcher reports the first failure on its own host; the earliest by far is the first of the job."""
        first = [one for one in self.ranks.values() if one.ended_first]
        times = [one.ended_s for one in first if one.ended_s is not None]
        if len(times) == len(first) > 1:
            for one in first:
                one.ended_first = (one.ended_s or 0) < min(times) + _LONG_S

    def _rank_of(self, statement: Statement) -> int | None:
        """The rank of a process, which is its local rank if there is only one host."""
        if statement.ranks:
            return statement.ranks[0]
        highest = max([self.world_size, *(rank + 1 for rank in self.ranks)])
        return statement.local_rank if highest <= RANKS_OF_A_HOST and not self._may_be_elsewhere else None

    def _attribute(self) -> None:
        """Gives the only exception of an unknown rank to the only rank that failed without a known exception."""
        own = [one for one in self.unnamed if not one.is_consequence]
        first = [one for one in self.ranks.values() if one.ended_first and (one.exit_code or 0) > 0]
        if len(own) == len(first) == 1 and first[0].exception is None and not first[0].timeouts:
            first[0].add_exception(own[0])
            self.unnamed.remove(own[0])

    def add_exception(self, exception: ExceptionFacts) -> None:
        """Keeps an exception of an unknown rank."""
        if len(self.unnamed) < _MOST_UNNAMED and exception not in self.unnamed:
            self.unnamed.append(exception)


class Starts:
    """All starts of a run. All files number them alike, so the second start in one file is the second in the others.

    Attributes:
        has_agents: Whether torchrun has started the ranks.
        has_hosts: Whether the job has several hosts.
    """

    def __init__(self) -> None:
        self.has_agents = False
        self.has_hosts = False
        self._by_number: dict[int, Start] = {}
        self._number = 0
        self._world_size = 0

    def begin(self, number: int) -> None:
        """Notes that a file begins with the start of this number."""
        self._number = number

    def again(self) -> None:
        """Notes that the run starts again; only the last start with any finding is kept."""
        last = self._last_with_finding()
        self._by_number = {number: start for number, start in self._by_number.items() if number == last}
        self._number += 1

    @property
    def now(self) -> Start:
        """The start that is being read."""
        return self._by_number.setdefault(self._number, Start())

    @property
    def last(self) -> Start:
        """The last start with any finding."""
        return self._by_number.get(self._last_with_finding(), Start())

    @property
    def world_size(self) -> int:
        """The number of ranks in the last start, otherwise in any start; 0 if unknown."""
        return self.last.world_size or self._world_size

    def note_size(self, size: int) -> None:
        """Keeps the number of ranks."""
        self.now.world_size = max(self.now.world_size, size)
        self._world_size = max(self._world_size, size)

    def _last_with_finding(self) -> int:
        return max((number for number, start in self._by_number.items() if start.has_finding), default=-1)


class Summary:
    """torchrun's summary, with time, host, rank and exit code on a line each, or all on one line."""

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
    """Whether a signal ended a process, by its exit code or that of its shell; aborts of waiting processes excepted."""
    return code is not None and (code < 0 or 128 < code <= 192) and code not in (-6, -15, 134, 143)


def _seconds(words: str) -> float | None:
    """The seconds at ``"2023-06-03_22:45:52"``, since any fixed time."""
    try:
        return (datetime.fromisoformat(words.replace("_", "T")) - datetime(2000, 1, 1)).total_seconds()
    except ValueError:
        return None


def finished(text: str) -> str:
    """Why ``Trainer.fit`` has stopped, according to Lightning: ``"max_epochs=2 reached"``; empty if it is not said."""
    found = _FINISHED.search(text)
    return f"{found['why']} reached" if found else ""


def begins_trainer(text: str) -> bool:
    """Whether a call of the Trainer begins, according to Lightning's strategies for GPUs."""
    return _BEGINS.match(text) is not None


def loses_store(text: str) -> bool:
    """Whether NCCL's monitor can no longer reach the store: at the end of any job, or before."""
    return _LOST_STORE in text


def launcher_remark(text: str) -> str:
    """A sentence about the job, from a launcher, or about the end of a child of Lightning's; empty if there is none."""
    child = _CHILD.search(text)
    if child is not None and whole(child[3]) not in _FOLLOWS:
        # Its number is the local rank, which equals the rank only on the first host.
        who = f"its child process {child[2]}, local rank {child[1]}, was the first to exit"
        return f"Lightning reports that {who}, with code {child[3]}; the host is not named."
    return next((sentence for pattern, sentence in _ENDINGS if pattern.search(text)), "")


def starts_again(text: str) -> bool:
    """Whether torchrun restarts all ranks here."""
    return "will restart worker group" in text


def has_started(text: str) -> bool:
    """Whether rank 0 prints Lightning's message that all ranks have joined: in a log that continues, the next start.

    A process prints it once, however many Trainers it makes.
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
    """Whether torchrun wrote this line; it starts the ranks itself, so that SLURM's tasks are its agents."""
    return _AGENT.search(text) is not None


def of_hosts(text: str) -> bool:
    """Whether a launcher's line is about several hosts, or another one than the first."""
    # Graphs have nodes, too.
    found = _HOSTS.finditer(text) if "edge_index" not in text else ()
    return any(whole(one["number"] or "0") > 1 or whole(one["rank"] or "0") > 0 for one in found)


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
