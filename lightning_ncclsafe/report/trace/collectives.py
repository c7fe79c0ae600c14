"""Collectives and phases of all ranks as a file for ui.perfetto.dev and chrome://tracing.

The format is the JSON object format of the Trace Event Format, which Chromium defines in
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; events of a thread must nest
(https://perfetto.dev/docs/faq). Perfetto leaves out the order that ``process_sort_index`` asks for.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.report.folder import replaced
from lightning_ncclsafe.report.times import straggler_sentence
from lightning_ncclsafe.report.trace.selection import Selection, select
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.summary import STEP_PHASES, TimingSummary
from lightning_ncclsafe.timing.windows import GAP, UNKNOWN_NS, Clock, GroupMembers, Spans

PHASES_TID = 1
_AT_ONCE = 10_000

Events = Iterator[list[str]]
"""Events as JSON text, some at a time."""

_LONG_AGO_NS = -(2**62)

_FIRST_GROUP_TID = 2
_MOST_OPS_NAMED = 3

# A fifth of the time of level 6, and half as large again.
_GZIP_LEVEL = 1
# Name and place of a rank and of its phases, and of both threads that a group has on it.
_NAMES_OF_RANK = 4
_NAMES_OF_MEMBER = 4


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Collectives of one group in the order of their sequence numbers: R ranks, K collectives.

    Attributes:
        group: The group; its ``ranks`` are the rows.
        ops: Operation of each collective, K names.
        seq: Sequence numbers, shape (K,).
        size_bytes: Bytes on one rank, shape (K,).
        arrival_ns: When each rank called it, shape (R, K).
        duration_ns: Duration on each rank's device, or unknown, shape (R, K).
    """

    group: GroupMembers
    ops: list[str]
    seq: NDArray[Any]
    size_bytes: NDArray[Any]
    arrival_ns: NDArray[Any]
    duration_ns: NDArray[Any]

    @property
    def is_timed(self) -> bool:
        """Whether any duration is known."""
        return bool((self.duration_ns > UNKNOWN_NS).any())

    @property
    def title(self) -> str:
        """What the group is called on the trace."""
        return self.group.description or f"group {self.group.name}"

    def waits(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin and end of each rank's waiting for the last one, shape (R, K) each.

        A rank that has called several collectives before the last rank comes waits for the first of them first: the
        wait for the next is drawn from where that one ends.
        """
        last_ns = self.arrival_ns.max(axis=0, initial=_LONG_AGO_NS)
        over_ns = np.maximum.accumulate(last_ns)
        before_ns = np.concatenate([[_LONG_AGO_NS], over_ns[:-1]])[: len(over_ns)]
        begin_ns = np.maximum(self.arrival_ns, before_ns)
        return begin_ns, np.maximum(begin_ns, last_ns)

    def runs(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin and end of each collective on each rank's device, shape (R, K) each; of no meaning where not timed.

        The collectives of a group run one after the other, none before it is called: the earliest times at which they
        can have run. With D the sum of durations, ``end[k] = max(arrival[k], end[k - 1]) + duration[k]`` is
        ``D[k] + max(arrival[j] - D[j - 1] for j <= k)``.
        """
        is_timed = self.duration_ns > UNKNOWN_NS
        taken_ns = np.where(is_timed, self.duration_ns, 0)
        sum_ns = np.cumsum(taken_ns, axis=1)
        ahead_ns = np.where(is_timed, self.arrival_ns - (sum_ns - taken_ns), _LONG_AGO_NS)
        end_ns = np.maximum.accumulate(ahead_ns, axis=1) + sum_ns
        return end_ns - taken_ns, end_ns


def tracks_of(calls: Sequence[MatchedCalls], columns: Sequence[NDArray[Any]]) -> list[Track]:
    """The kept collectives of all blocks, by group."""
    blocks: dict[tuple[str, tuple[int, ...]], list[tuple[MatchedCalls, NDArray[Any]]]] = defaultdict(list)
    for block, kept in zip(calls, columns, strict=True):
        if kept.any():
            blocks[block.group.name, block.group.ranks].append((block, np.flatnonzero(kept)))
    return [_track(parts) for parts in blocks.values()]


def _track(parts: list[tuple[MatchedCalls, NDArray[Any]]]) -> Track:
    seq = np.concatenate([block.seq[kept] for block, kept in parts])
    order = np.argsort(seq, kind="stable")
    ops = [block.ops[number] for block, kept in parts for number in block.op[kept].tolist()]
    return Track(
        group=parts[-1][0].group,
        ops=[ops[number] for number in order],
        seq=seq[order],
        size_bytes=np.concatenate([block.size_bytes[kept] for block, kept in parts])[order],
        arrival_ns=np.concatenate([block.arrival_ns[:, kept] for block, kept in parts], axis=1)[:, order],
        duration_ns=np.concatenate([block.duration_ns[:, kept] for block, kept in parts], axis=1)[:, order],
    )


def name_events(ranks: Iterable[int], tracks: list[Track], summary: TimingSummary) -> Events:
    """Names of processes, which are ranks, and of their threads."""
    clocks = {one.rank: one.clock for one in summary.ranks}
    threads: dict[int, list[tuple[int, str]]] = {rank: [(PHASES_TID, "phases")] for rank in ranks}
    for number, track in enumerate(tracks):
        tid = _group_tid(number)
        # A dictionary, as names are wanted in the order in which operations first came.
        ops = [*dict.fromkeys(track.ops)]
        words = ", ".join(ops[:_MOST_OPS_NAMED]) + (", …" if len(ops) > _MOST_OPS_NAMED else "")
        is_timed = track.is_timed
        for rank in track.group.ranks:
            if is_timed:
                threads[rank].append((tid, f"{words} ({track.title})"))
            threads[rank].append((tid + 1, f"waits ({track.title})"))
    for rank, named in threads.items():
        yield [
            _metadata("process_name", rank, 0, name=f"rank {rank}{_clock_words(clocks.get(rank, Clock()))}"),
            _metadata("process_sort_index", rank, 0, sort_index=rank),
            *(_metadata("thread_name", rank, tid, name=name) for tid, name in named),
            *(_metadata("thread_sort_index", rank, tid, sort_index=tid) for tid, _ in named),
        ]


def _clock_words(clock: Clock) -> str:
    if clock.uncertainty_ns < 0:
        return " (clock unknown)"
    if not clock.offset_ns and not clock.uncertainty_ns:
        return ""
    return f" ({clock.offset_ns / 1e6:+.2f} ms ± {clock.uncertainty_ns / 1e6:.2f} ms clock)"


def _metadata(what: str, rank: int, tid: int, **args: object) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args})


def _group_tid(number: int) -> int:
    return _FIRST_GROUP_TID + 2 * number


def instant_event(name: str, rank: int, ts: float) -> str:
    """Something that all of the trace should show."""
    return json.dumps({"ph": "i", "s": "g", "name": name, "pid": rank, "tid": PHASES_TID, "ts": ts})


def straggler_events(summary: TimingSummary, start_ns: int) -> list[str]:
    """Stragglers, at the times at which they began to be late."""
    return [
        instant_event(straggler_sentence(straggler), straggler.rank, max(straggler.since_ns - start_ns, 0) / 1000)
        for straggler in summary.stragglers
    ]


def track_events(track: Track, number: int, start_ns: int) -> Events:
    """All events of a group's collectives, one collective at a time: what each rank waited, and what it took."""
    begin_ns, end_ns = track.waits()
    first_ns, last_ns = track.arrival_ns.min(axis=0), track.arrival_ns.max(axis=0)
    waits = _micros(begin_ns - start_ns), _micros(end_ns - begin_ns)
    lateness = _millis(last_ns - track.arrival_ns), _millis(track.arrival_ns - first_ns)
    last_rows = track.arrival_ns.argmax(axis=0).tolist()
    runs = _micros(track.runs()[0] - start_ns), _micros(track.duration_ns)
    heads = zip(map(json.dumps, track.ops), track.seq.tolist(), track.size_bytes.tolist(), last_rows, strict=True)
    is_timed = track.is_timed
    for k, (op, seq, size, last_row) in enumerate(heads):
        args = f'"seq":{seq},"op":{op},"bytes":{size},"last_rank":{track.group.ranks[last_row]}'
        made = _wait_events(track, _group_tid(number) + 1, (*waits, *lateness), k, args, last_row)
        if is_timed:
            made += _run_events(
                track, _group_tid(number), runs, k, f'"name":{op},"args":{{"seq":{seq},"bytes":{size}}}'
            )
        yield made


def _wait_events(
    track: Track, tid: int, columns: tuple[NDArray[Any], ...], k: int, args: str, last_row: int
) -> list[str]:
    rows = zip(track.group.ranks, *(column[k].tolist() for column in columns), strict=True)
    tail = f'"name":"waits for rank {track.group.ranks[last_row]}","args":{{{args}'
    made = [
        f'{{"ph":"X","pid":{rank},"tid":{tid},"ts":{begin},"dur":{taken},{tail},"wait_ms":{wait},"lateness_ms":{late}}}}}'
        for rank, begin, taken, wait, late in rows
    ]
    begin, late = columns[0][k][last_row], columns[3][k][last_row]
    # The last one waits for nobody; a mark shows where it came.
    made[last_row] = (
        f'{{"ph":"i","s":"t","pid":{track.group.ranks[last_row]},"tid":{tid},"ts":{begin},"name":"last",'
        f'"args":{{{args},"wait_ms":0.0,"lateness_ms":{late}}}}}'
    )
    return made


def _run_events(track: Track, tid: int, columns: tuple[NDArray[Any], ...], k: int, tail: str) -> list[str]:
    rows = zip(track.group.ranks, *(column[k].tolist() for column in columns), strict=True)
    unknown = UNKNOWN_NS / 1000
    return [
        f'{{"ph":"X","pid":{rank},"tid":{tid},"ts":{begin},"dur":{taken},{tail}}}'
        for rank, begin, taken in rows
        if taken > unknown
    ]


def _micros(ns: NDArray[Any]) -> NDArray[Any]:
    """Microseconds by collective and rank, shape (K, R); whole nanoseconds are three decimals of a double's repr."""
    return np.ascontiguousarray(ns.T) / 1000


def _millis(ns: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(ns.T) / 1_000_000


def write_trace(
    path: Path,
    *,
    calls: Sequence[MatchedCalls],
    spans: Spans,
    summary: TimingSummary,
    forgotten: int = 0,
    most_events: int = 1_000_000,
) -> int:
    """Writes a trace, compressed and private to the user, in the place of an earlier one.

    Every rank is a process with a thread of its phases and, for each process group, one of its collectives (where the
    back end gives durations) and one of what it waited for the last rank. Times are microseconds from the first event;
    its time of day is in the file's ``otherData``.

    Args:
        path: Where to; its folder must exist.
        calls: Matched collectives, all on the reference clock.
        spans: Array of :data:`~lightning_ncclsafe.timing.windows.SPAN`, on the reference clock.
        summary: Clocks of the ranks, and the stragglers.
        forgotten: Older collectives, of which ``calls`` has the worst only, if any; the trace says so.
        most_events: Room, names of ranks and threads included. Where there is more, the collectives with the greatest
            skew are kept, the newest, some in even distances, and the phases before them.

    Returns:
        The number of events written.

    Raises:
        OSError: If the folder is gone or full; no part of a file is left behind.
    """
    until_ns = max((int(block.arrival_ns.max()) for block in calls if block.arrival_ns.size), default=0)
    times = span_times(spans, until_ns)
    ranks = sorted({rank for block in calls for rank in block.group.ranks} | set(np.unique(times.rank).tolist()))
    # Names are written whatever the room.
    members = {(block.group.name, block.group.ranks) for block in calls}
    names = _NAMES_OF_RANK * len(ranks) + _NAMES_OF_MEMBER * sum(len(of_group) for _, of_group in members)
    reserved = names + len(summary.stragglers) + 1
    kept = select(calls, times.begin_ns, times.end_ns, max(most_events - reserved, 0))
    tracks, drawn = tracks_of(calls, kept.columns), times.only(kept.spans)
    firsts = [
        int(begin_ns.min()) for begin_ns in (*(track.arrival_ns for track in tracks), drawn.begin_ns) if begin_ns.size
    ]
    start_ns = min(firsts, default=summary.began_ns)
    old = f"of the {forgotten:,} oldest collectives, only some with the greatest skew were kept" if forgotten else ""
    left_out = _left_out_words(kept, sum(len(block.seq) for block in calls), len(times.rank))
    left_out = "; ".join(filter(None, [left_out, old]))
    about: dict[str, object] = {
        "start_ns": start_ns,
        "start": datetime.fromtimestamp(start_ns / 1e9, tz=timezone.utc).isoformat(),
        "clock": "rank 0",
        "left_out": left_out,
        "missing": [*summary.missing],
    }
    head: dict[str, object] = {"displayTimeUnit": "ns", "otherData": about}
    return _write(path, head, _events(ranks, tracks, drawn, summary, start_ns, left_out))


def _left_out_words(kept: Selection, collectives: int, phases: int) -> str:
    if not kept.collectives and not kept.phases:
        return ""
    return (
        f"{kept.collectives:,} of {collectives:,} collectives and {kept.phases:,} of {phases:,} phases are left out: "
        "the trace shows those with the greatest skew, the newest, and an even sample of the rest"
    )


def _events(
    ranks: list[int], tracks: list[Track], drawn: SpanTimes, summary: TimingSummary, start_ns: int, left_out: str
) -> Events:
    yield from name_events(ranks, tracks, summary)
    if left_out:
        yield [instant_event(left_out, ranks[0] if ranks else 0, 0.0)]
    yield straggler_events(summary, start_ns)
    yield from span_events(drawn, start_ns)
    for number, track in enumerate(tracks):
        yield from track_events(track, number, start_ns)


def _write(path: Path, head: dict[str, object], events: Events) -> int:
    count = 0
    with replaced(path) as raw, gzip.GzipFile("", "wb", _GZIP_LEVEL, raw) as file:
        file.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n'.encode())
        for made in events:
            if made:
                file.write(("" if count == 0 else ",\n").encode() + ",\n".join(made).encode())
                count += len(made)
        file.write(b"\n]}\n")
    return count
