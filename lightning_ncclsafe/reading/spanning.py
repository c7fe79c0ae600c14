"""Messages of several lines in a log: how each begins, which lines continue it, and what it means."""

import re
from collections.abc import Iterator

from lightning_ncclsafe.facts import Statement, StatementKind
from lightning_ncclsafe.facts.wording import clause
from lightning_ncclsafe.reading import printed_stacks
from lightning_ncclsafe.reading.fingerprints import Mismatch
from lightning_ncclsafe.reading.printed_stacks import PrintedStacks
from lightning_ncclsafe.reading.values import ranks, whole
from lightning_ncclsafe.report.lines import cut

_LONGEST_LINE = 300
_LONGEST_DETAIL = 200
_MOST_LINES = 12
_MOST_LISTED = 1024
_FAULTS = {"Segmentation fault": -11, "Bus error": -7, "Illegal instruction": -4, "Floating point exception": -8}
_Match = re.Match[str]

WORDS = (
    "ismatch",
    ") MISMATCH",
    ") INCOMPLETE",
    "first process to do so was",
    " RUNNING AT ",
    "Fatal Python error",
    "communicator data",
    "ranks",
    "] finished ",
    "-np ",
    *printed_stacks.WORDS,
)
"""Every first line of these messages has one of these words, and so has the command that starts ranks of MPI."""


def _line(text: str) -> str:
    return cut(text.strip(), _LONGEST_LINE)


class Spanning:
    """Reads them line by line: one reader for each form, which keeps a bounded number of lines."""

    def __init__(self) -> None:
        self._readers = (
            Mismatch(),
            _Counts(),
            _FirstToEnd(),
            _Fault(),
            _Stalled(),
            _Absent(),
            _Snapshot(),
            PrintedStacks(),
        )

    @property
    def is_open(self) -> bool:
        """Whether a message continues in the next line."""
        return any(one.is_open for one in self._readers)

    def read(self, text: str, rank: int | None) -> Iterator[Statement]:
        """The statements that end with this line."""
        for one in self._readers:
            yield from one.read(text, rank)

    def flush(self) -> Iterator[Statement]:
        """The statements that the last lines of the file have begun."""
        for one in self._readers:
            yield from one.flush()


class _FirstToEnd:
    """Who was the first to end, by launchers of MPI programs, and some lines below how.

    Open MPI and Horovod: ``The first process to do so was:``, ``Process name: [[29973,1],0]``, ``Exit code:    1``;
    Horovod's elastic driver, which names a host and a slot of it: ``Process name: worker-1[0]``; Intel's MPI: ``RANK 2
    PID 77 RUNNING AT node-a``, ``KILLED BY SIGNAL: 9 (Killed)``; MPICH, which names no rank: ``PID 77 RUNNING AT
    node-a``, and of a signal ``EXIT STRING: Killed (signal 9)``.
    """

    _BEGINS = ("first process to do so was", " RUNNING AT ")
    _RANK = re.compile(
        r"Process name: (?:\[\[\d+,\d+\],|\[[\w.@-]{1,100},)?(\d{1,7})\]?\s*$|RANK (\d{1,7}) PID \d+ RUNNING"
    )
    _NAME = "Process name: "
    _CODE = re.compile(r"(?:Exit code|EXIT STATUS): *(\d{1,3})")
    _SIGNAL = re.compile(r"KILLED BY SIGNAL: *(\d{1,3})|EXIT STRING: [\w ]{1,60} \(signal (\d{1,3})\)")
    _MOST_BETWEEN = 8

    def __init__(self) -> None:
        self._left = 0
        self._rank: str | None = None
        self._has_name = False

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def read(self, text: str, _: int | None) -> Iterator[Statement]:
        if any(words in text for words in self._BEGINS):
            self._left, self._rank, self._has_name = self._MOST_BETWEEN, None, False
        elif not self._left:
            return
        self._left -= 1
        if named := self._RANK.search(text):
            self._rank = named[1] or named[2]
        self._has_name |= self._rank is not None or self._NAME in text
        code, ended_by = self._CODE.search(text), self._SIGNAL.search(text)
        if ended_by is not None or (code is not None and self._has_name):
            number = -whole(ended_by[1] or ended_by[2]) if ended_by is not None else whole(code[1] if code else "")
            self._left = 0
            yield Statement(
                kind=StatementKind.ENDED,
                ranks=ranks([self._rank] if self._rank else []),
                exit_code=number,
                detail="mpirun",
                line=_line(text),
            )

    def flush(self) -> Iterator[Statement]:
        """Nothing is known about a message that was cut."""
        self._left = 0
        yield from ()


class _Fault:
    """``Fatal Python error: Segmentation fault``, and below it the stacks of the process.

    The stacks show whether the process was a launcher, whose fault shows nothing about a rank.
    """

    _BEGINS = re.compile(
        r"Fatal Python error: (Segmentation fault|Bus error|Illegal instruction|Floating point exception)"
    )
    _GOES_ON = re.compile(r'\s*(?:File "|(?:Current thread|Thread) 0x|<no Python frame>|\.\.\.|$)')
    _OF_LAUNCHER = re.compile(
        r"torch/distributed/(?:run\.py|launch\.py|launcher/|elastic/agent/)|deepspeed/launcher/|accelerate/commands/launch"
    )
    # A forked process has its launcher's frames below its own.
    _OF_CHILD = re.compile(r'multiprocessing/process\.py", line \d+ in _bootstrap')
    _MOST_LINES = 200

    def __init__(self) -> None:
        self._said: Statement | None = None
        self._left = 0
        self._is_launcher = False
        self._is_child = False

    @property
    def is_open(self) -> bool:
        return self._said is not None

    def read(self, text: str, rank: int | None) -> Iterator[Statement]:
        begins = self._BEGINS.search(text)
        self._left -= 1
        if begins is not None or (self.is_open and (not self._left or not self._GOES_ON.match(text))):
            yield from self.flush()
        if begins is not None:
            self._said = Statement(
                kind=StatementKind.ENDED, by=rank, exit_code=_FAULTS[begins[1]], detail="Python", line=_line(text)
            )
            self._left, self._is_launcher, self._is_child = self._MOST_LINES, False, False
        elif self.is_open:
            self._is_launcher |= self._OF_LAUNCHER.search(text) is not None
            self._is_child |= self._OF_CHILD.search(text) is not None

    def flush(self) -> Iterator[Statement]:
        said, self._said = self._said, None
        if said is not None and (self._is_child or not self._is_launcher):
            yield said


class _Counts:
    """NCCL's RAS: how many operations the ranks of a communicator have launched, and from which it has no data.

    It may have been asked between two operations: only if it says the same twice in a row, those with fewer are behind.
    """

    _BEGINS = re.compile(r"^\s*(#\d+-\d+ \(\w+\)) (?:MISMATCH|INCOMPLETE)")
    _KIND = re.compile(r"have different (\w{1,40}) operation counts")
    _COUNT = re.compile(r"(\d+) ranks? ha(?:s|ve) launched up to operation (\d+)")
    _RANK = re.compile(r"^\s*Rank (\d+) -- ")
    _LOST = re.compile(r"Missing communicator data from")

    def __init__(self) -> None:
        self.is_open = False
        self._communicator = self._kind = ""
        # The latest answer about each kind of operation of each communicator, and on which counts it rests.
        self._said: dict[tuple[str, str], tuple[dict[int, int], Statement]] = {}
        self._reset()

    def _reset(self) -> None:
        self._counts: dict[int, int] = {}
        self._listed: list[int] = []
        self._by_count: dict[int, list[int]] = {}
        self._is_lost = False
        self._idle = 0
        self._line = ""

    def read(self, text: str, _: int | None) -> Iterator[Statement]:
        count, rank = self._COUNT.search(text), self._RANK.match(text)
        begins, kind, lost = self._BEGINS.match(text), self._KIND.search(text), self._LOST.search(text) is not None
        if begins is not None or kind is not None:
            yield from self._end()
            self._communicator = begins[1] if begins is not None else self._communicator
            self._kind = kind[1] if kind is not None else ""
        self.is_open = self.is_open or any(found is not None for found in (begins, kind, count)) or lost
        if not self.is_open:
            return
        self._take(count, rank)
        self._line = self._line or _line(text)
        self._is_lost = self._is_lost or lost
        self._idle = 0 if begins or kind or count or rank or lost else self._idle + 1
        if self._idle > _MOST_LINES:
            yield from self._end()

    def _take(self, count: _Match | None, rank: _Match | None) -> None:
        if count is not None and len(self._counts) < _MOST_LISTED:
            self._counts[whole(count[2])] = whole(count[1])
        if rank is not None and len(self._listed) < _MOST_LISTED:
            self._listed.append(whole(rank[1]))
            if self._counts:
                self._by_count.setdefault([*self._counts][-1], []).append(whole(rank[1]))

    def _end(self) -> Iterator[Statement]:
        listed = ranks(self._listed)
        if self._is_lost and listed:
            yield Statement(
                kind=StatementKind.ABSENT, ranks=listed, detail="NCCL's RAS has no data from them", line=self._line
            )
        elif len(self._counts) > 1:
            most = max(self._counts, key=lambda operation: self._counts[operation])
            few = sum(number for operation, number in self._counts.items() if operation != most)
            words = " and ".join(
                f"{number} ranks have launched up to operation {operation}"
                for operation, number in self._counts.items()
            )
            who = listed if len(listed) == few else self._behind()
            detail = cut(f"NCCL's RAS reports that {words}", _LONGEST_DETAIL)
            said = Statement(kind=StatementKind.AHEAD, ranks=who, detail=detail, line=self._line)
            if len(self._said) < _MOST_LISTED or (self._communicator, self._kind) in self._said:
                self._said[self._communicator, self._kind] = (self._counts, said)
        self.is_open = False
        self._reset()

    def flush(self) -> Iterator[Statement]:
        yield from self._end()
        yield from (said for _, said in self._said.values())
        self._said.clear()
        self._communicator = self._kind = ""

    def _behind(self) -> tuple[int, ...]:
        """The ranks with fewer operations than others, if all are listed, and had as many when RAS was asked before."""
        before, _ = self._said.get((self._communicator, self._kind), ({}, None))
        is_whole = all(len(self._by_count.get(operation, ())) == number for operation, number in self._counts.items())
        if not (self._communicator and before == self._counts and is_whole):
            return ()
        most = max(self._counts)
        return ranks([rank for operation, who in self._by_count.items() if operation < most for rank in who])


class _Stalled:
    """Horovod's warning that some ranks have submitted what others have not, by tensor or by rank.

    ``Stalled ops: a [missing ranks: 0]``, ``a [ready ranks: 3], b [ready ranks: 0, 1]``, since 0.19 ``Missing ranks:``
    and below it ``0: [a, b]``. If one tensor waits for ranks that wait with another tensor, ranks run different
    operations. Of a list of those that are ready, the launcher's command shows who is missing.
    """

    _BEGINS = "or more tensors were submitted to be reduced"
    _TENSOR = re.compile(r"([\w./:-]{1,300}) \[(missing|ready) ranks: ([\d, ]{1,4000})\]")
    _RANKS = re.compile(r"(?:^|[\s>])(\d{1,7}): \[([^\]]{1,4000})")
    _LAUNCH = re.compile(r"\b(?:mpirun|mpiexec|horovodrun)\b[^\n]{0,200}?\s--?np +(\d{1,6})\b")
    _MOST_BETWEEN = 4

    def __init__(self) -> None:
        self._left = 0
        self._line = ""
        self._missing: dict[str, set[int]] = {}
        self._ready: dict[str, set[int]] = {}
        self._world_size = 0

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def read(self, text: str, _: int | None) -> Iterator[Statement]:
        self._world_size = self._launched(text) or self._world_size
        begins = self._BEGINS in text
        tensors = self._TENSOR.findall(text) if " ranks: " in text else []
        if begins:
            yield from self.flush()
        if not (begins or tensors or self.is_open):
            return
        for name, how, who in tensors:
            self._take(self._missing if how == "missing" else self._ready, name, ranks(who))
        by_rank = self._RANKS.findall(text) if self.is_open and not tensors else []
        for who, names in by_rank:
            for name in names.split(","):
                self._take(self._missing, name.strip(), ranks([who]))
        if tensors or by_rank:
            self._line = self._line or _line(text)
        self._left = self._MOST_BETWEEN if begins or tensors or by_rank else self._left - 1
        if not self._left:
            yield from self.flush()

    def _launched(self, text: str) -> int:
        """The number of ranks that a line starts; 0 for any other line."""
        command = self._LAUNCH.search(text) if "-np " in text else None
        return int(command[1]) if command else 0

    def _take(self, of: dict[str, set[int]], name: str, who: tuple[int, ...]) -> None:
        if name in of or len(of) < _MOST_LISTED:
            of.setdefault(name, set()).update(who)

    def flush(self) -> Iterator[Statement]:
        missing, ready = list(self._missing.values()), list(self._ready.values())
        apart = _least(missing) or _least(ready)
        always = set.intersection(*missing) if missing else set()
        if ready and not missing and self._world_size <= _MOST_LISTED:
            always = {*range(self._world_size)}.difference(*ready)
        words = "Horovod warns that"
        if apart:
            yield Statement(
                kind=StatementKind.APART,
                ranks=ranks(sorted(apart)),
                detail=f"{words} ranks wait in different operations, each for the others",
                line=self._line,
            )
        elif always:
            yield Statement(
                kind=StatementKind.LATE,
                ranks=ranks(sorted(always)),
                detail=f"{words} not all have called what the others wait in",
                line=self._line,
            )
        self._left, self._line = 0, ""
        self._missing.clear()
        self._ready.clear()


class _Absent:
    """PyTorch's analyser of Flight Recorder dumps, which lists missing ranks some lines below the number."""

    _BEGINS = "ranks joining collective"
    _NUMBER = re.compile(r"sequence number: (\d+)|collective:? ?(\d+)")
    _RANKS = re.compile(r"missing ranks: ?\{([\d, ]+)\}")
    is_open = False
    """Each of its lines is recognised by itself."""

    def __init__(self) -> None:
        self._at = ""

    def read(self, text: str, _: int | None) -> Iterator[Statement]:
        if self._BEGINS in text:
            found = self._NUMBER.search(text)
            self._at = f"number {found[1] or found[2]}" if found else "a collective"
        elif self._at and "missing ranks" in text and (named := self._RANKS.search(text)):
            detail = f"PyTorch's dump analyzer reports that they did not join {self._at}"
            yield Statement(kind=StatementKind.ABSENT, ranks=ranks(named[1]), detail=detail, line=_line(text))
            self._at = ""

    def flush(self) -> Iterator[Statement]:
        yield from ()


class _Snapshot:
    """The end of PyTorch's desync report, whose beginning is missing: who has finished and started which number.

    ``#611 finished ranks:``, ``[0] finished ALLREDUCE``, ``#612 started ranks:``, ``[1] started ALLREDUCE``. Numbers
    ascend, and each rank is listed once: whoever has finished a number before the last has not called the next one.
    """

    # A whole report says this itself, and names its writer.
    _IS_WHOLE = ("our best knowledge", "Timeout at collective")
    _SECTION = re.compile(r"^\s*#(\d+) (?:started|finished) ranks:\s*$")
    _RANKS = re.compile(r"^\s*\[([\d, ]{1,4000})\] (started|finished) \w+\s*$")

    def __init__(self) -> None:
        self._is_whole = False
        self._reset()

    def _reset(self) -> None:
        self._number = ""
        self._finished: tuple[str, set[int]] | None = None
        self._started: tuple[str, tuple[int, ...]] | None = None
        self._has_lower = False
        self._line = ""

    @property
    def is_open(self) -> bool:
        return bool(self._line)

    def read(self, text: str, _: int | None) -> Iterator[Statement]:
        section, listed = self._SECTION.match(text), self._RANKS.match(text)
        if any(words in text for words in self._IS_WHOLE):
            self._is_whole = True
        elif section is not None or listed is not None:
            self._line = _line(text)
            self._number = section[1] if section is not None else self._number
            if listed is not None:
                self._take(listed[2], ranks(listed[1]))
        elif self.is_open:
            yield from self.flush()

    def _take(self, how: str, listed: tuple[int, ...]) -> None:
        if how == "finished":
            self._finished = self._finished or (self._number, set())
            if self._finished[0] == self._number:
                self._finished[1].update(listed)
        elif self._finished is None or whole(self._number or "0") < whole(self._finished[0] or "0"):
            # These ranks are behind those that have finished a later number.
            self._has_lower = True
        elif self._finished[0] != self._number:
            self._started = self._started or (self._number, listed)

    def flush(self) -> Iterator[Statement]:
        if self._finished is not None and self._started is not None and not (self._is_whole or self._has_lower):
            number, who = self._started
            yield Statement(
                kind=StatementKind.LATE,
                ranks=ranks(sorted(self._finished[1])),
                detail=f"by the end of PyTorch's desync report, {clause(who, 'has|have')} started number {number}",
                line=self._line,
            )
        self._reset()


def _least(sets: list[set[int]]) -> set[int]:
    """The smaller of two disjoint sets, or both if they have the same size; empty if all sets overlap."""
    for one in sets:
        other = next((other for other in sets if one.isdisjoint(other)), None)
        if other is not None:
            return one | other if len(one) == len(other) else min(one, other, key=len)
    return set()
