"""Phases of ranks as a trace draws them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.step_phases import STEP_PHASES
from lightning_ncclsafe.timing.windows import GAP, Spans

PHASES_TID = 1
_AT_ONCE = 10_000

Events = Iterator[list[str]]
"""Events as JSON text, some at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTimes:
    """Phases of ranks with their ends, shape (number of spans,) each."""

    rank: NDArray[Any]
    phase: NDArray[Any]
    begin_ns: NDArray[Any]
    end_ns: NDArray[Any]

    def only(self, kept: NDArray[Any]) -> "SpanTimes":
        """Those that are marked."""
        return SpanTimes(
            rank=self.rank[kept], phase=self.phase[kept], begin_ns=self.begin_ns[kept], end_ns=self.end_ns[kept]
        )


def span_times(spans: Spans, until_ns: int) -> SpanTimes:
    """Each lasts until its rank's next one, or a gap; the last one of a rank until ``until_ns``. By rank and time."""
    ordered = spans[np.lexsort((spans["begin_ns"], spans["rank"]))]
    rank, begin_ns = ordered["rank"], ordered["begin_ns"].astype(np.int64)
    is_followed = np.append(rank[1:] == rank[:-1], [False])[: len(rank)]
    end_ns = np.where(is_followed, np.append(begin_ns[1:], [0])[: len(rank)], np.maximum(begin_ns, until_ns))
    found = SpanTimes(rank=rank, phase=ordered["phase"], begin_ns=begin_ns, end_ns=end_ns)
    return found.only(found.phase != GAP)


def span_events(times: SpanTimes, start_ns: int) -> Events:
    """Phases, some thousands at a time."""
    names = [json.dumps(phase.value) for phase in STEP_PHASES]
    # A number that this version has no name for.
    names += [json.dumps(f"phase {number}") for number in range(len(names), 256)]
    for first in range(0, len(times.rank), _AT_ONCE):
        part = times.only(np.arange(first, min(first + _AT_ONCE, len(times.rank))))
        columns = zip(
            part.rank.tolist(),
            part.phase.tolist(),
            ((part.begin_ns - start_ns) / 1000).tolist(),
            ((part.end_ns - part.begin_ns) / 1000).tolist(),
            strict=True,
        )
        yield [
            f'{{"ph":"X","pid":{rank},"tid":{PHASES_TID},"ts":{begin},"dur":{taken},"name":{names[phase]}}}'
            for rank, phase, begin, taken in columns
        ]
