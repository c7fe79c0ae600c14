"""Stacks on the page: each once for all ranks that have it, outliers first, common frames apart."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.facts.wording import capitalised, clause, ranks_words
from lightning_ncclsafe.rules.kit.activity import awaited_thread

_MOST_STACKS = 16
_MOST_FRAMES = 80
# This few library frames between user frames are not folded.
_FEW_FRAMES = 3
# The innermost frames show what a rank is doing.
_INNERMOST = 2
_PACKAGES = "-packages/"
# Stacks of awaited threads, and those that other ranks have read: of workers, and of ranks that did not answer.
_MOST_SEEN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive frames; library frames may be folded.

    Attributes:
        frames: Outermost first.
        title: Summary of folded frames, ``"14 frames of lightning, torch"``; empty for frames that are always shown.
    """

    frames: tuple[Frame, ...]
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack, and the ranks that have it.

    Attributes:
        number: Counts them on the page, from 1.
        title: The ranks, or the process that another rank has looked at, in words.
        is_named: Whether the first finding names one of them.
        raised: The exception whose traceback this is, in words; empty for the stack of the main thread.
        runs: Its frames, without the common ones.
        cut: Number of outer frames that are left out.
    """

    number: int
    title: str
    is_named: bool
    raised: str
    runs: tuple[Run, ...]
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """All stacks of a job.

    Attributes:
        shown: Those of the ranks that the first finding names, then those that few ranks have, then the others.
        common: The outer frames of all stacks.
        left_out: Number of stacks that are left out.
        number_of: The number of each rank's stack, if it is shown.
    """

    shown: tuple[Stack, ...]
    common: tuple[Run, ...]
    left_out: int
    number_of: dict[int, int]


def stacks_of(diagnosis: Diagnosis) -> Stacks:
    """Groups ranks with equal stacks; for a rank that raised, the traceback."""
    named = {rank for finding in diagnosis.findings[:1] for rank in finding.ranks}
    alike: dict[tuple[str, tuple[Frame, ...]], list[int]] = defaultdict(list)
    for facts in diagnosis.job.ranks:
        raised = facts.exception
        stack = (raised.type, raised.stack) if raised is not None and raised.stack else ("", facts.stack)
        if stack[1]:
            alike[stack].append(facts.rank)
    ordered = sorted(alike.items(), key=lambda item: (named.isdisjoint(item[1]), len(item[1]), item[1]))
    common = _in_common([stack for (_, stack), _ in ordered])
    shown = tuple(
        _made(number, ranks, raised, stack, common, bool(named.intersection(ranks)))
        for number, ((raised, stack), ranks) in enumerate(ordered[:_MOST_STACKS], 1)
    )
    seen = [*_seen_from_outside(diagnosis, named)][:_MOST_SEEN]
    outside = tuple(
        Stack(number=number, title=title, is_named=is_named, raised="", runs=tuple(_runs(stack, _INNERMOST)))
        for number, (title, is_named, stack) in enumerate(seen, len(shown) + 1)
    )
    number_of = {rank: number for number, (_, ranks) in enumerate(ordered[:_MOST_STACKS], 1) for rank in ranks}
    left_out = max(len(ordered) - _MOST_STACKS, 0)
    outer = ordered[0][0][1][:common] if ordered else ()
    first = sum(stack.is_named for stack in shown)
    shown = (*shown[:first], *outside, *shown[first:])
    return Stacks(shown=shown, common=tuple(_runs(outer, 0)), left_out=left_out, number_of=number_of)


def _seen_from_outside(diagnosis: Diagnosis, named: set[int]) -> Iterator[tuple[str, bool, tuple[Frame, ...]]]:
    """Title, whether a finding names the rank, and frames, of stacks of awaited threads, workers and silent ranks."""
    yield from _of_awaited_threads(diagnosis, named)
    alike: dict[tuple[int, tuple[Frame, ...]], list[int]] = defaultdict(list)
    for facts in diagnosis.job.ranks:
        for worker in facts.workers if facts.rank in named else ():
            if worker.stack:
                alike[facts.rank, worker.stack].append(worker.pid)
    for (rank, stack), pids in alike.items():
        workers = f"Worker {pids[0]}" if len(pids) == 1 else f"{len(pids)} workers"
        yield f"{workers} of rank {rank}", True, stack
    for process in diagnosis.job.witnessed:
        if process.stack:
            yield f"Rank {process.rank}, as seen from outside", process.rank in named, process.stack


def _of_awaited_threads(diagnosis: Diagnosis, named: set[int]) -> Iterator[tuple[str, bool, tuple[Frame, ...]]]:
    alike: dict[tuple[Frame, ...], list[int]] = defaultdict(list)
    for facts in diagnosis.job.ranks:
        if facts.rank in named and (thread := awaited_thread(facts)) is not None:
            alike[thread.stack].append(facts.rank)
    for stack, ranks in alike.items():
        yield f"The thread{'s' * (len(ranks) > 1)} that {clause(ranks, 'waits|wait')} for", True, stack


def _in_common(stacks: Sequence[tuple[Frame, ...]]) -> int:
    """How many outer frames all stacks have in common; at least one of each stack stays its own."""
    if len(stacks) < 2:
        return 0
    # The common prefix of the first and the last in sorted order is that of all.
    first, last = min(stacks, key=_sortable), max(stacks, key=_sortable)
    equal = 0
    for one, other in zip(first, last, strict=False):
        if _sortable((one,)) != _sortable((other,)):
            break
        equal += 1
    return min(equal, *(len(stack) - 1 for stack in stacks))


def _sortable(stack: tuple[Frame, ...]) -> list[tuple[str, int, str]]:
    return [(frame.file, frame.line, frame.function) for frame in stack]


def _made(number: int, ranks: list[int], raised: str, stack: tuple[Frame, ...], common: int, is_named: bool) -> Stack:
    own = stack[common:]
    return Stack(
        number=number,
        title=capitalised(ranks_words(ranks)),
        is_named=is_named,
        raised=raised,
        runs=tuple(_runs(own[-_MOST_FRAMES:], _INNERMOST)),
        cut=max(len(own) - _MOST_FRAMES, 0),
    )


def _runs(frames: tuple[Frame, ...], innermost: int) -> list[Run]:
    """Keeps user frames and the innermost ones; folds library frames between them."""
    always = len(frames) - innermost
    runs = []
    numbered = list(enumerate(frames))
    for is_shown, group in groupby(numbered, key=lambda item: item[1].user or item[0] >= always):
        part = tuple(frame for _, frame in group)
        folds = not is_shown and len(part) >= _FEW_FRAMES
        runs.append(Run(frames=part, title=f"{len(part)} frames of {_packages(part)}" if folds else ""))
    return runs


def _packages(frames: Sequence[Frame]) -> str:
    """The packages of frames: ``"lightning, torch"``, the most frequent first."""
    names = [_package(frame) for frame in frames]
    ordered = sorted(set(names), key=lambda name: (-names.count(name), name))
    return ", ".join(ordered[:3]) + (", …" if len(ordered) > 3 else "")


def _package(frame: Frame) -> str:
    path = frame.file.replace("\\", "/")
    inside = path.rpartition(_PACKAGES)[2] if _PACKAGES in path else path
    if frame.mark:
        return "lightning_ncclsafe"
    return inside.partition("/")[0] if _PACKAGES in path else "Python"
