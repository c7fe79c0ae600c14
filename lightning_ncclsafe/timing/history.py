"""The part of a run's history that pictures of it need, in bounded memory."""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.lateness import Intervals, Lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.windows import GAP, OWN, SPAN, Spans

KEPT_NS = 180_000_000_000
"""Everything of the last three minutes is kept; memory grows no further after that."""

# Kept however old: with long steps, three minutes show too little.
_LEAST_BYTES = 1 << 20
_LEAST_SPANS_OF_A_RANK = 2000
# What is older did not lead to a collective: its group is one of many, and is called rarely.
_LED_TO_NS = 30_000_000_000
# One long delay contains many collectives; others are worth a look, too.
_WORST_OF_A_BLOCK = 4
_MOST_SPANS_OF_A_MOMENT = 64
_BINS = 512
# Overhead of the arrays of a block.
_BLOCK_BYTES = 2000
_FIRST_BIN_NS = 1_000_000_000


class LatenessHistory:
    """How late each rank was, over the whole run: in bins of time that widen as the run continues.

    Attributes:
        began_ns: When the first bin begins; 0 without bins.
        bin_ns: Width of a bin.
    """

    def __init__(self, world_size: int) -> None:
        self._late_s = np.zeros((world_size, _BINS), dtype=np.float32)
        self._used = 0
        self.began_ns = 0
        self.bin_ns = _FIRST_BIN_NS

    @property
    def late_s(self) -> NDArray[Any]:
        """Seconds for which each rank was late in each bin, shape (world size, bins)."""
        return self._late_s[:, : self._used]

    def add(self, calls: MatchedCalls, late: Lateness) -> None:
        """Adds a block of collectives."""
        at_ns = calls.arrival_ns.max(axis=0)
        self.began_ns = self.began_ns or int(at_ns.min())
        while (int(at_ns.max()) - self.began_ns) // self.bin_ns >= _BINS:
            self._widen()
        bins = np.clip((at_ns - self.began_ns) // self.bin_ns, 0, _BINS - 1)
        for number in np.unique(bins):
            self._late_s[list(calls.group.ranks), number] += late.late_ns[:, bins == number].sum(axis=1) / 1e9
        self._used = max(self._used, int(bins.max()) + 1)

    def _widen(self) -> None:
        pairs = self._late_s.reshape(len(self._late_s), _BINS // 2, 2).sum(axis=2)
        self._late_s[:, : _BINS // 2], self._late_s[:, _BINS // 2 :] = pairs, 0
        self._used = (self._used + 1) // 2
        self.bin_ns *= 2


class RecentSpans:
    """The last phases of each rank, on the reference clock.

    Args:
        limit: Most spans that are kept, all ranks together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.by_rank: dict[int, Spans] = {}

    def add(self, spans: Spans) -> None:
        """Adds spans, which for each rank are later than those before."""
        is_sorted = bool((np.diff(spans["rank"]) >= 0).all())
        ordered = spans if is_sorted else spans[np.argsort(spans["rank"], kind="stable")]
        ranks, starts = np.unique(ordered["rank"], return_index=True)
        if not len(ranks):
            return
        most = max(self._limit // max(len(self.by_rank), len(ranks)), 16)
        for rank, part in zip(ranks.tolist(), np.split(ordered, starts[1:]), strict=True):
            known = self.by_rank.get(rank, np.zeros(0, SPAN))
            self.by_rank[rank] = np.concatenate([known, part])[-most:]

    def forget(self, before_ns: int) -> None:
        """Forgets what was over by then, except each rank's last 2,000."""
        for rank, known in self.by_rank.items():
            self.by_rank[rank] = known[min(_position(known, before_ns), max(len(known) - _LEAST_SPANS_OF_A_RANK, 0)) :]


class RecentOwnWork:
    """When code of this package last kept ranks busy, on the reference clock.

    Args:
        limit: Most intervals that are kept, all ranks together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows = np.zeros(0, OWN)

    def add(self, own: NDArray[Any]) -> None:
        """Adds intervals, an array of :data:`~lightning_ncclsafe.timing.windows.OWN`."""
        if len(own):
            self._rows = np.concatenate([self._rows, own])[-self._limit :]

    def since(self, ns: int) -> Intervals | None:
        """The intervals that ended since then; None if there are none."""
        rows = self._rows[self._rows["end_ns"] > ns]
        if not len(rows):
            return None
        by_rank = {int(rank): rows[rows["rank"] == rank] for rank in np.unique(rows["rank"])}
        return Intervals({rank: (of_rank["begin_ns"], of_rank["end_ns"]) for rank, of_rank in by_rank.items()})


class RecentCalls:
    """The last matched collectives: those of the last three minutes, or with long steps as many as fit into 1 MiB.

    Args:
        limit_bytes: Most bytes that are kept, however young.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._blocks: deque[MatchedCalls] = deque()

    @property
    def blocks(self) -> list[MatchedCalls]:
        """The blocks, oldest first."""
        return list(self._blocks)

    @property
    def began_ns(self) -> int:
        """When the step of the oldest block began, on the reference clock; there has to be a block."""
        oldest = self._blocks[0]
        first_ns = int(oldest.arrival_ns.min())
        return max(min(int(oldest.before_ns.max()), first_ns), first_ns - _LED_TO_NS)

    def add(self, calls: MatchedCalls) -> list[MatchedCalls]:
        """Adds a block; returns the oldest ones, which are forgotten for it."""
        self._blocks.append(calls)
        self._bytes += _size_of(calls)
        forgotten = []
        since_ns = int(calls.arrival_ns.max()) - KEPT_NS
        while len(self._blocks) > 1:
            oldest, size_bytes = self._blocks[0], _size_of(self._blocks[0])
            is_old = self._bytes - size_bytes >= _LEAST_BYTES and int(oldest.arrival_ns.max()) < since_ns
            if self._bytes <= self._limit_bytes and not is_old:
                break
            forgotten.append(self._blocks.popleft())
            self._bytes -= size_bytes
        return forgotten


class WorstMoments:
    """Of the forgotten collectives, those with the largest skew, with the phases before them."""

    def __init__(self, limit_bytes: int, *, least_ns: float) -> None:
        self._limit_bytes = limit_bytes
        self._least_ns = least_ns
        self._bytes = 0
        self._numbers = count()
        # The least comes first; no two have the same number, so that calls are never compared.
        self._heap: list[tuple[int, int, MatchedCalls, list[Spans]]] = []

    def add(self, forgotten: MatchedCalls, spans: Mapping[int, Spans]) -> None:
        """Keeps the worst of a block.

        Args:
            spans: Phases of its ranks by rank, on the reference clock.
        """
        skew_ns = np.ptp(forgotten.arrival_ns, axis=0)
        for column in np.argsort(-skew_ns, kind="stable")[:_WORST_OF_A_BLOCK].tolist():
            apart_ns = int(skew_ns[column])
            is_full = self._bytes >= self._limit_bytes
            if apart_ns < self._least_ns or (is_full and (not self._heap or apart_ns <= self._heap[0][0])):
                return
            calls = _only(forgotten, column)
            before = [_before(calls, spans[rank]) for rank in calls.group.ranks if rank in spans]
            heapq.heappush(self._heap, (apart_ns, next(self._numbers), calls, [part for part in before if len(part)]))
            self._bytes += _size_of_moment(calls, before)
            while self._bytes > self._limit_bytes:
                _, _, calls, before = heapq.heappop(self._heap)
                self._bytes -= _size_of_moment(calls, before)

    @property
    def blocks(self) -> list[MatchedCalls]:
        """The collectives, each a block, in the order of time."""
        return sorted((calls for _, _, calls, _ in self._heap), key=lambda calls: int(calls.arrival_ns.max()))

    def spans_with(self, recent: Mapping[int, Spans]) -> Spans:
        """The phases before them, and the last ones, by rank; those between are forgotten."""
        before: dict[int, list[tuple[Spans, int]]] = {rank: [] for rank in sorted(recent)}
        for _, _, calls, parts in self._heap:
            for part in parts:
                before.setdefault(int(part["rank"][0]), []).append((part, int(calls.arrival_ns.max())))
        made = [np.zeros(0, SPAN)]
        for rank, own in before.items():
            last = recent.get(rank, np.zeros(0, SPAN))
            if own:
                made.append(_with_gaps(rank, own, until_ns=int(last["begin_ns"][0]) if len(last) else None))
            made.append(last)
        return np.concatenate(made)


def _with_gaps(rank: int, moments: list[tuple[Spans, int]], *, until_ns: int | None) -> Spans:
    """Phases of some moments of a rank, each up to its end, before its last phases begin; moments may overlap."""
    moments = sorted(moments, key=lambda moment: int(moment[0]["begin_ns"][0]))
    begins = [int(spans["begin_ns"][0]) for spans, _ in moments[1:]]
    made: list[Spans] = []
    end_ns = 0
    for (spans, ended_ns), next_ns in zip(moments, [*begins, until_ns], strict=True):
        end_ns = max(end_ns, ended_ns)
        made.append(spans)
        if next_ns is None or end_ns < next_ns:
            made.append(np.array([(rank, GAP, end_ns)], dtype=SPAN))
    found = np.unique(np.concatenate(made))
    found = found[np.argsort(found["begin_ns"], kind="stable")]
    return found if until_ns is None else found[found["begin_ns"] < until_ns]


def _only(block: MatchedCalls, column: int) -> MatchedCalls:
    """One collective of a block; copied, as a view would keep the whole block in memory."""
    this = slice(column, column + 1)
    return replace(
        block,
        op=block.op[this].copy(),
        seq=block.seq[this].copy(),
        step=block.step[this].copy(),
        size_bytes=block.size_bytes[this].copy(),
        arrival_ns=block.arrival_ns[:, this].copy(),
        duration_ns=block.duration_ns[:, this].copy(),
        before_ns=block.arrival_ns[:, column - 1].copy() if column else block.before_ns.copy(),
        follows=block.follows[this].copy(),
    )


def _before(calls: MatchedCalls, spans: Spans) -> Spans:
    """A rank's phases from the collective before until this one; the first begins no earlier than that."""
    begin_ns = min(int(calls.before_ns.max()), int(calls.arrival_ns.min()))
    part: Spans = spans[_position(spans, begin_ns) : _position(spans, int(calls.arrival_ns.max())) + 1]
    is_whole = len(part) <= _MOST_SPANS_OF_A_MOMENT
    part = part[-_MOST_SPANS_OF_A_MOMENT:].copy()
    if is_whole:
        part["begin_ns"][:1] = np.maximum(part["begin_ns"][:1], begin_ns)
    return part


def _position(spans: Spans, moment_ns: int) -> int:
    """The index of a rank's span at a moment, or 0; numpy would copy all spans to search them."""
    return max(bisect_right(spans["begin_ns"], moment_ns) - 1, 0)


def _size_of(calls: MatchedCalls) -> int:
    return int(_BLOCK_BYTES + calls.arrival_ns.nbytes + calls.duration_ns.nbytes + 5 * calls.seq.nbytes)


def _size_of_moment(calls: MatchedCalls, spans: list[Spans]) -> int:
    return _size_of(calls) + sum(part.nbytes for part in spans)
