"""Collectives and phases of all ranks as a file for ui.perfetto.dev and chrome://tracing.

The format is the JSON object format of the Trace Event Format, which Chromium defines in
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; events of a thread must nest
(https://perfetto.dev/docs/faq). Perfetto leaves out the order that ``process_sort_index`` asks for.
"""

import gzip
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from lightning_ncclsafe.report.trace.events import instant_event, name_events, straggler_events, track_events
from lightning_ncclsafe.report.trace.selection import Selection, select
from lightning_ncclsafe.report.trace.spans import Events, SpanTimes, span_events, span_times
from lightning_ncclsafe.report.trace.tracks import Track, tracks_of
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.summary import TimingSummary
from lightning_ncclsafe.timing.windows import Spans

# A fifth of the time of level 6, and half as large again.
_GZIP_LEVEL = 1
# Name and place of a rank and of its phases, and of both threads that a group has on it.
_NAMES_OF_RANK = 4
_NAMES_OF_MEMBER = 4


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
    reserved = _names(ranks, calls) + len(summary.stragglers) + 1
    kept = select(calls, times.begin_ns, times.end_ns, max(most_events - reserved, 0))
    tracks, drawn = tracks_of(calls, kept.columns), times.only(kept.spans)
    start_ns = _first_ns(tracks, drawn, summary)
    left_out = "; ".join(
        filter(None, [_left_out_words(kept, sum(len(block.seq) for block in calls), len(times.rank)), _old(forgotten)])
    )
    head: dict[str, object] = {"displayTimeUnit": "ns", "otherData": _about(start_ns, left_out, summary)}
    return _write(path, head, _events(ranks, tracks, drawn, summary, start_ns, left_out))


def _names(ranks: list[int], calls: Sequence[MatchedCalls]) -> int:
    """How many events names take, at most; they are written whatever the room."""
    groups = {(block.group.name, block.group.ranks) for block in calls}
    return _NAMES_OF_RANK * len(ranks) + _NAMES_OF_MEMBER * sum(len(members) for _, members in groups)


def _first_ns(tracks: list[Track], drawn: SpanTimes, summary: TimingSummary) -> int:
    firsts = [int(track.arrival_ns.min()) for track in tracks]
    firsts += [int(drawn.begin_ns.min())] if len(drawn.begin_ns) else []
    return min(firsts, default=summary.began_ns)


def _left_out_words(kept: Selection, collectives: int, phases: int) -> str:
    if not kept.collectives and not kept.phases:
        return ""
    return (
        f"{kept.collectives:,} of {collectives:,} collectives and {kept.phases:,} of {phases:,} phases are left out: "
        "shown are the collectives with the greatest skew, the newest and some in even distances"
    )


def _old(forgotten: int) -> str:
    if not forgotten:
        return ""
    return f"of the {forgotten:,} oldest collectives, only some for which ranks came furthest apart were kept"


def _about(start_ns: int, left_out: str, summary: TimingSummary) -> dict[str, object]:
    start = datetime.fromtimestamp(start_ns / 1e9, tz=timezone.utc)
    about: dict[str, object] = {"start_ns": start_ns, "start": start.isoformat(), "clock": "rank 0"}
    return about | {"left_out": left_out, "missing": [*summary.missing]}


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
    """Readers see the old file or the new one, never a part; mkstemp makes files that only this user can read."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as raw, gzip.GzipFile("", "wb", _GZIP_LEVEL, raw) as file:
            file.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n'.encode())
            count = 0
            for made in events:
                if made:
                    file.write(("" if count == 0 else ",\n").encode() + ",\n".join(made).encode())
                    count += len(made)
            file.write(b"\n]}\n")
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return count
