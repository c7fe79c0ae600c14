"""Leaves out whole runs of calls where there are more than can be shared; the same ones on every rank."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.timing.windows import Window

# Who was late for a call is found from the one before it, so what stays has to hang together.
_RUN = 64
_SPANS_A_CALL = 4


def limited(window: Window, most_calls: int) -> Window:
    """The same window, with at most so many calls of each rank and group.

    Of more than that, every second, fourth, … run of 64 sequence numbers stays, so that ranks that have made equally
    many keep the same, without a word. What is left out is counted.

    Args:
        window: A window of any ranks.
        most_calls: Most calls of one rank in one group.
    """
    calls = window.calls
    most_spans = _SPANS_A_CALL * most_calls * max(len(window.clocks), 1)
    if len(calls) <= most_calls and max(len(window.spans), len(window.own)) <= most_spans:
        return window
    kept = np.ones(len(calls), dtype=bool)
    own_of = calls["rank"].astype(np.int64) * len(window.groups) + calls["group"]
    for number in np.unique(own_of):
        own = own_of == number
        kept[own] = (calls["seq"][own] // _RUN) % _stride(calls["seq"][own], most_calls) == 0
    left_out = dict(window.left_out)
    for rank, count in zip(*np.unique(calls["rank"][~kept], return_counts=True), strict=True):
        left_out[int(rank)] = left_out.get(int(rank), 0) + int(count)
    return replace(
        window, calls=calls[kept], spans=window.spans[-most_spans:], own=window.own[-most_spans:], left_out=left_out
    )


def _stride(seq: NDArray[Any], most_calls: int) -> int:
    if len(seq) <= most_calls:
        return 1
    # Of what was thinned before fewer are left than were made, and those are of a stride already.
    made, stride = max(len(seq), int(seq.max() - seq.min()) + 1), 1
    while made > most_calls * stride:
        stride *= 2
    return stride
