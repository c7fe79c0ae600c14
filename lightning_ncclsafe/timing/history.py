"""What is kept of a run for its pictures, in memory that does not grow with it."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.lateness import Lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.waits import Intervals
from lightning_ncclsafe.timing.windows import OWN, SPAN, Spans

_BINS = 512
# What the arrays of a block take beside what is in them.
_BLOCK_BYTES = 2000
_FIRST_BIN_NS = 1_000_000_000


class LatenessHistory:
    """How late each rank was, over the whole run: bins of time that are made wider as it goes on.

    Args:
        world_size: Number of ranks.

    Attributes:
        began_ns: When the first bin begins; 0 as long as there is none.
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
        self._by_rank: dict[int, Spans] = {}

    def add(self, spans: Spans) -> None:
        """Adds spans, which for each rank are later than those before."""
        ranks, starts = np.unique(spans["rank"], return_index=True) if _is_sorted(spans) else _sorted_ranks(spans)
        if not len(ranks):
            return
        ordered = spans if _is_sorted(spans) else spans[np.argsort(spans["rank"], kind="stable")]
        most = max(self._limit // max(len(self._by_rank), len(ranks)), 16)
        for rank, part in zip(ranks.tolist(), np.split(ordered, starts[1:]), strict=True):
            known = self._by_rank.get(rank, np.zeros(0, SPAN))
            self._by_rank[rank] = np.concatenate([known, part])[-most:]

    @property
    def by_rank(self) -> dict[int, Spans]:
        """Those of each rank."""
        return self._by_rank

    def all(self) -> Spans:
        """Those of all ranks, by rank."""
        return np.concatenate([np.zeros(0, SPAN), *(self._by_rank[rank] for rank in sorted(self._by_rank))])


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
        """Those that have ended since then; None if there are none."""
        rows = self._rows[self._rows["end_ns"] > ns]
        if not len(rows):
            return None
        by_rank = {int(rank): rows[rows["rank"] == rank] for rank in np.unique(rows["rank"])}
        return Intervals({rank: (of_rank["begin_ns"], of_rank["end_ns"]) for rank, of_rank in by_rank.items()})


class RecentCalls:
    """The last matched collectives.

    Args:
        limit_bytes: Most bytes that are kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._blocks: deque[MatchedCalls] = deque()

    @property
    def blocks(self) -> list[MatchedCalls]:
        """The blocks, oldest first."""
        return list(self._blocks)

    def add(self, calls: MatchedCalls) -> None:
        """Adds a block, and forgets the oldest where there are too many."""
        self._blocks.append(calls)
        self._bytes += _size_of(calls)
        while self._bytes > self._limit_bytes and len(self._blocks) > 1:
            self._bytes -= _size_of(self._blocks.popleft())


def _is_sorted(spans: Spans) -> bool:
    return bool((np.diff(spans["rank"]) >= 0).all())


def _sorted_ranks(spans: Spans) -> tuple[NDArray[Any], NDArray[Any]]:
    ranks, starts = np.unique(np.sort(spans["rank"]), return_index=True)
    return ranks, starts


def _size_of(calls: MatchedCalls) -> int:
    return int(_BLOCK_BYTES + calls.arrival_ns.nbytes + calls.duration_ns.nbytes + 5 * calls.seq.nbytes)
