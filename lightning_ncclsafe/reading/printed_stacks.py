"""Stacks of several ranks that py-spy has printed: who is in a collective, and who waits for something else.

A rank counts only if the command of its process has its number, and only what the Python stack shows: whoever computes,
or waits for its GPU, may have called what the others are in.
"""

import re
from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import COLLECTIVES, DATALOADER, WAITS_FOR_OTHERS
from lightning_ncclsafe.facts import Frame, Statement, StatementKind
from lightning_ncclsafe.facts.wording import clause, ranks_words
from lightning_ncclsafe.reading.values import MOST_RANKS, frame, whole

_BEGINS = re.compile(r"^Process \d{1,10}: (?P<command>.{0,4000})")
_RANK = re.compile(r"--(?:local[-_])?rank[= ]['\"]?(\d{1,6})\b|::\w{1,60}_TP(\d{1,6})\b")
_MAIN = re.compile(r'^Thread \S{1,40} \([\w+]{1,40}\): "MainThread"')
_FRAME = re.compile(r"^\s+(?P<function>\S.{0,199}?) \((?P<file>[^()]{1,400}):(?P<line>\d{1,7})\)\s*$")
_LIBRARIES = re.compile(
    r"(?:^|/)(?:torch|multiprocessing|concurrent/futures)/|^(?:threading|queue|selectors|subprocess|socket)\.py$"
)
# With ``--locals``, py-spy prints these below each frame, further in.
_INDENTED = " " * 8
_HOSTS = re.compile(r"--?(?:nnodes|node[-_]rank|num[-_]machines|machine[-_]rank)[= ]['\"]?(?!1\b|0\b)")
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_MOST_FRAMES = 200
_MOST_RANKS = 1024

WORDS = ("Process ", '"MainThread"')
"""Every line with which such a stack begins has one of these words."""


class PrintedStacks:
    """Reads them line by line, and compares them at the end of the file."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._rank: int | None = None
        self._stacks: dict[int, list[Frame]] = {}
        # Local ranks may be those of several hosts.
        self._is_mixed = False
        self.is_open = False

    def read(self, text: str, _: int | None) -> Iterator[Statement]:
        """Reads the next line; the statements that end with it, which are none."""
        begins = _BEGINS.match(text)
        self._is_mixed |= "-" in text and _HOSTS.search(text) is not None
        if begins is not None:
            found = _RANK.search(begins["command"])
            self._rank = whole(found[1] or found[2], MOST_RANKS) if found is not None else None
            self.is_open = False
        elif self._rank is not None and _MAIN.match(text):
            self.is_open = len(self._stacks) < _MOST_RANKS
            self._is_mixed |= self._rank in self._stacks or not self.is_open
            if self.is_open:
                self._stacks[self._rank] = []
        elif self.is_open and self._rank is not None:
            self._take(self._stacks[self._rank], text)
        yield from ()

    def _take(self, stack: list[Frame], text: str) -> None:
        if text.startswith(_INDENTED):
            return
        found = _FRAME.match(text)
        self.is_open = found is not None and len(stack) < _MOST_FRAMES
        if found is not None:
            stack.append(frame(found["file"], whole(found["line"]), found["function"]))

    def flush(self) -> Iterator[Statement]:
        """What all stacks of the file show together."""
        stacks = {} if self._is_mixed else {rank: stack for rank, stack in sorted(self._stacks.items()) if stack}
        self._reset()
        calls = {rank: call for rank, stack in stacks.items() if (call := _collective(stack))}
        late = tuple(rank for rank, stack in stacks.items() if rank not in calls and _waits_elsewhere(stack))
        if not calls or len(calls) + len(late) < len(stacks):
            return
        by_call = {call: tuple(rank for rank in calls if calls[rank] == call) for call in calls.values()}
        there = ", and ".join(f"{clause(who, 'is|are')} in {call}" for call, who in by_call.items())
        if late:
            at = _place(stacks[late[0]])
            line = f"{ranks_words(late[:1])}: {at}"
            detail = f"py-spy shows that {clause(late, 'is|are')} at {at}, and {there}"
            yield Statement(kind=StatementKind.LATE, ranks=late, detail=detail, line=line)
        elif len(by_call) == len(calls) == 2 and by_call.keys().isdisjoint(_POINT_TO_POINT):
            detail = f"py-spy shows that {there}"
            line = "; ".join(f"{ranks_words(who[:1])}: {_place(stacks[who[0]])}" for who in by_call.values())
            yield Statement(kind=StatementKind.APART, ranks=tuple(calls), detail=detail, line=line)


def _collective(stack: list[Frame]) -> str:
    """The call of ``torch.distributed`` that a stack is in, the innermost frame first; empty if it is in none."""
    return next((one.function for one in stack if COLLECTIVES.has(one.file, one.function)), "")


def _waits_elsewhere(stack: list[Frame]) -> bool:
    """Whether the innermost frames wait for a thread, a process or a loader."""
    return any((WAITS_FOR_OTHERS | DATALOADER).has(one.file, one.function) for one in stack[:3])


def _place(stack: list[Frame]) -> str:
    """``"__next__ (mt/data/iterators.py:651)"``: the innermost frame that is not a library's."""
    one = next((one for one in stack if not _LIBRARIES.search(one.file)), stack[0])
    return f"{one.function} ({one.file}:{one.line})"
