"""What ranks send each other about their collectives: some seconds, of one rank or of many."""

import io
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Calls = NDArray[Any]
Spans = NDArray[Any]

CALL = np.dtype(
    [
        ("rank", "<i4"),
        ("group", "<u2"),
        ("op", "<u2"),
        ("seq", "<i8"),
        ("step", "<i8"),
        ("size_bytes", "<i8"),
        ("created_ns", "<i8"),
        ("duration_ns", "<i8"),
    ]
)
"""One collective as one rank called it. ``group`` and ``op`` are positions in the window's tables; ``step`` counts the
rank's training batches; ``created_ns`` is the rank's own wall clock; ``duration_ns`` is that on the device, or -1."""

SPAN = np.dtype([("rank", "<i4"), ("phase", "<i4"), ("begin_ns", "<i8")])
"""A phase of a rank, by number: from ``begin_ns``, on the rank's own wall clock, until its next span begins."""

GAP = -1
"""In place of a phase: what the rank did until its next span is unknown."""

OWN = np.dtype([("rank", "<i4"), ("begin_ns", "<i8"), ("end_ns", "<i8")])
"""Code of this package kept a rank busy from ``begin_ns`` to ``end_ns``, on the rank's own wall clock."""

UNKNOWN_NS = -1
"""A duration that the back end does not record."""

# An array of this size would be some 5 GB: no rank writes that.
_MOST_ROWS = 100_000_000

# Lateness is computed from a call and the one before it, so neighbours have to stay together.
_RUN = 64
_SPANS_A_CALL = 4


class WindowError(ValueError):
    """What a rank sent about its collectives cannot be read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A rank's wall clock against that of the reference, rank 0.

    Attributes:
        offset_ns: How much it is ahead.
        uncertainty_ns: Bound of its error; negative while the offset is unknown.
    """

    offset_ns: int = 0
    uncertainty_ns: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """A process group.

    Attributes:
        description: Its ``group_desc``, the purpose of the group.
        ranks: Global ranks of its members, ascending.
        backend: ``"nccl"``, ``"gloo"``, …
    """

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTotal:
    """How often a rank has called an operation since the last window, whether or not each call is in the window.

    Attributes:
        group: Name of the process group.
        op: The operation.
        count: Number of calls.
        size_bytes: Bytes of all of them.
        duration_ns: Time on the device of those whose duration is known.
        timed: Number of those.
    """

    group: str
    op: str
    count: int = 0
    size_bytes: int = 0
    duration_ns: int = 0
    timed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some seconds of one rank or of many.

    Attributes:
        calls: Array of :data:`CALL`, in ascending order of ``created_ns`` for each rank.
        spans: Array of :data:`SPAN`, in ascending order of ``begin_ns`` for each rank.
        own: Array of :data:`OWN`.
        groups: Process groups, by the number that calls give them.
        ops: Operations, by number, e.g. ``"all_reduce"``.
        clocks: Clock of each rank in the window.
        totals: All calls of the ranks, by rank.
        lost: Calls that the recorder overwrote before they were read, by rank.
        left_out: Calls that were read but left out of the window because there were too many, by rank.
        last: Whether this is the last window, by rank.
        missing: What could not be recorded, one sentence each.
    """

    calls: Calls
    spans: Spans
    groups: tuple[GroupMembers, ...] = ()
    ops: tuple[str, ...] = ()
    clocks: dict[int, Clock]
    totals: dict[int, tuple[OpTotal, ...]]
    lost: dict[int, int]
    left_out: dict[int, int]
    last: frozenset[int] = frozenset()
    missing: tuple[str, ...] = ()
    own: NDArray[Any] = field(default_factory=lambda: np.zeros(0, OWN))


def empty_window() -> Window:
    """An empty window."""
    return Window(calls=np.zeros(0, CALL), spans=np.zeros(0, SPAN), clocks={}, totals={}, lost={}, left_out={})


def joined(windows: list[Window]) -> Window:
    """Joins windows of different ranks, or of the same ranks in the order of time."""
    groups: dict[str, GroupMembers] = {}
    ops: dict[str, int] = {}
    for window in windows:
        # A group may have no members yet on a rank that has just met it, and have them on another.
        groups |= {group.name: group for group in window.groups if group.ranks or group.name not in groups}
        for op in window.ops:
            ops.setdefault(op, len(ops))
    numbers = {name: number for number, name in enumerate(groups)}
    return Window(
        calls=_concatenated([_renumbered(window, numbers, ops) for window in windows], CALL),
        spans=_concatenated([window.spans for window in windows], SPAN),
        own=_concatenated([window.own for window in windows], OWN),
        groups=tuple(groups.values()),
        ops=tuple(ops),
        clocks={rank: clock for window in windows for rank, clock in window.clocks.items()},
        totals=_totals(windows),
        lost=_sums([window.lost for window in windows]),
        left_out=_sums([window.left_out for window in windows]),
        last=frozenset().union(*(window.last for window in windows)),
        missing=tuple(dict.fromkeys(sentence for window in windows for sentence in window.missing)),
    )


def encode(window: Window) -> bytes:
    """A window as bytes: numpy's own format, without pickled objects."""
    header = {
        "groups": [[group.name, group.description, group.ranks, group.backend] for group in window.groups],
        "ops": window.ops,
        "clocks": [[rank, clock.offset_ns, clock.uncertainty_ns] for rank, clock in window.clocks.items()],
        "totals": [
            [rank, total.group, total.op, total.count, total.size_bytes, total.duration_ns, total.timed]
            for rank, totals in window.totals.items()
            for total in totals
        ],
        "lost": [*window.lost.items()],
        "left_out": [*window.left_out.items()],
        "last": sorted(window.last),
        "missing": window.missing,
    }
    made = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez_compressed(made, calls=window.calls, spans=window.spans, own=window.own, header=text)
    return made.getvalue()


def decode(data: bytes) -> Window:
    """The window that :func:`encode` made.

    Raises:
        WindowError: If it is not one.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as parts:
            header = json.loads(bytes(parts["header"]).decode())
            calls, spans, own = parts["calls"], parts["spans"], parts["own"]
        if (calls.dtype, spans.dtype, own.dtype) != (CALL, SPAN, OWN):
            raise ValueError(f"arrays of {calls.dtype}, {spans.dtype} and {own.dtype}")
        if (calls.ndim, spans.ndim, own.ndim) != (1, 1, 1) or max(map(len, (calls, spans, own))) > _MOST_ROWS:
            raise ValueError(f"arrays of {calls.shape}, {spans.shape} and {own.shape}")
        groups = tuple(
            GroupMembers(
                name=str(name), description=str(description), ranks=tuple(map(int, ranks)), backend=str(backend)
            )
            for name, description, ranks, backend in header["groups"]
        )
        ops = tuple(map(str, header["ops"]))
        if len(calls) and (calls["group"].max() >= len(groups) or calls["op"].max() >= len(ops)):
            raise ValueError("a call of a group or an operation that is not named")
        totals: dict[int, tuple[OpTotal, ...]] = {}
        for rank, group, op, count, size_bytes, duration_ns, timed in header["totals"]:
            total = OpTotal(
                group=str(group),
                op=str(op),
                count=int(count),
                size_bytes=int(size_bytes),
                duration_ns=int(duration_ns),
                timed=int(timed),
            )
            totals[int(rank)] = (*totals.get(int(rank), ()), total)
        return Window(
            calls=calls,
            spans=spans,
            own=own,
            groups=groups,
            ops=ops,
            clocks={int(r): Clock(offset_ns=int(o), uncertainty_ns=int(u)) for r, o, u in header["clocks"]},
            totals=totals,
            lost={int(rank): int(count) for rank, count in header["lost"]},
            left_out={int(rank): int(count) for rank, count in header["left_out"]},
            last=frozenset(map(int, header["last"])),
            missing=tuple(map(str, header["missing"])),
        )
    except Exception as error:  # numpy, zipfile and json each have errors of their own
        raise WindowError(f"What ranks sent about their collectives cannot be read: {error!r}.") from error


def _renumbered(window: Window, groups: dict[str, int], ops: dict[str, int]) -> Calls:
    calls: Calls = window.calls.copy()
    if len(calls):
        calls["group"] = np.array([groups[group.name] for group in window.groups], dtype="<u2")[calls["group"]]
        calls["op"] = np.array([ops[op] for op in window.ops], dtype="<u2")[calls["op"]]
    return calls


def _concatenated(parts: list[NDArray[Any]], dtype: "np.dtype[Any]") -> NDArray[Any]:
    made: NDArray[Any] = np.concatenate([np.zeros(0, dtype), *parts])
    return made


def _totals(windows: list[Window]) -> dict[int, tuple[OpTotal, ...]]:
    sums: dict[int, dict[tuple[str, str], OpTotal]] = {}
    for window in windows:
        for rank, totals in window.totals.items():
            known = sums.setdefault(rank, {})
            for total in totals:
                before = known.get((total.group, total.op), OpTotal(group=total.group, op=total.op))
                known[total.group, total.op] = OpTotal(
                    group=total.group,
                    op=total.op,
                    count=before.count + total.count,
                    size_bytes=before.size_bytes + total.size_bytes,
                    duration_ns=before.duration_ns + total.duration_ns,
                    timed=before.timed + total.timed,
                )
    return {rank: tuple(known.values()) for rank, known in sums.items()}


def _sums(counts: list[dict[int, int]]) -> dict[int, int]:
    sums = Counter[int]()
    for count in counts:
        sums.update(count)
    return dict(sums)


def limited(window: Window, most_calls: int) -> Window:
    """The window with at most this many calls of each rank and group.

    Of more calls, every second, fourth, … run of 64 sequence numbers stays, so that ranks with equally many calls keep
    the same ones without communication. The calls that are left out are counted.
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
    # Calls that were thinned before are fewer than were made, and already have a stride.
    made, stride = max(len(seq), int(seq.max() - seq.min()) + 1), 1
    while made > most_calls * stride:
        stride *= 2
    return stride
