"""Events of a trace as JSON text. A million of them are made here: f-strings on whole columns, no dictionaries."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ncclsafe.report.straggler_line import straggler_sentence
from lightning_ncclsafe.report.trace.spans import PHASES_TID, Events
from lightning_ncclsafe.report.trace.tracks import Track
from lightning_ncclsafe.timing.summary import TimingSummary
from lightning_ncclsafe.timing.windows import UNKNOWN_NS, Clock

_FIRST_GROUP_TID = 2
_MOST_OPS_NAMED = 3


def name_events(ranks: Iterable[int], tracks: list[Track], summary: TimingSummary) -> Events:
    """Names of processes, which are ranks, and of their threads."""
    clocks = {told.rank: told.clock for told in summary.ranks}
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
    told = _millis(last_ns - track.arrival_ns), _millis(track.arrival_ns - first_ns)
    last_rows = track.arrival_ns.argmax(axis=0).tolist()
    runs = _micros(track.runs()[0] - start_ns), _micros(track.duration_ns)
    heads = zip(map(json.dumps, track.ops), track.seq.tolist(), track.size_bytes.tolist(), last_rows, strict=True)
    is_timed = track.is_timed
    for k, (op, seq, size, last_row) in enumerate(heads):
        args = f'"seq":{seq},"op":{op},"bytes":{size},"last_rank":{track.group.ranks[last_row]}'
        made = _wait_events(track, _group_tid(number) + 1, (*waits, *told), k, args, last_row)
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
