"""One incident as a trace for ui.perfetto.dev and chrome://tracing: what every rank did, called, and where it stopped.

The format is that of :mod:`lightning_ncclsafe.report.trace.collectives`, which draws collectives that all ranks have
called, from arrays of times; here are those that ranks wait in. Times are those of each host's own clock.
"""

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from lightning_ncclsafe.facts import Collective, RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.facts.wording import call_words, location_of
from lightning_ncclsafe.report.lines import safe
from lightning_ncclsafe.report.text import answer_words, incident_words
from lightning_ncclsafe.rules.kit.activity import hook_words

_ACTIONS_TID = 1
_FIRST_GROUP_TID = 2

Event = dict[str, Any]


def render_trace(diagnosis: Diagnosis) -> str:
    """The trace as JSON text: every rank is a process with a thread of its actions and one of each process group."""
    job = diagnosis.job
    now_ns = max((facts.taken_ns for facts in job.ranks), default=job.incident.opened_ns)
    events = [event for facts in job.ranks for event in _rank_events(facts, now_ns)]
    for rank in job.silent:
        events += _names(rank, f"rank {rank} (did not answer)")
        events.append(_metadata("thread_name", rank, _ACTIONS_TID, name="nothing is known"))
    start_ns = min((event["ts"] for event in events if "ts" in event), default=now_ns)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - start_ns) / 1000
    head = {"displayTimeUnit": "ms", "otherData": _about(diagnosis, start_ns)}
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'


def _about(diagnosis: Diagnosis, start_ns: int) -> Event:
    return {
        "start_ns": start_ns,
        "start": datetime.fromtimestamp(start_ns / 1e9, tz=timezone.utc).isoformat(),
        "clock": "each host's own",
        "answer": safe(answer_words(diagnosis)),
        "incident": safe(incident_words(diagnosis)),
    }


def _rank_events(facts: RankFacts, now_ns: int) -> Iterator[Event]:
    """Times are still nanoseconds since the epoch here."""
    taken_ns = facts.taken_ns or now_ns
    yield from _names(facts.rank, f"rank {facts.rank}" + (f" ({safe(facts.host)})" if facts.host else ""))
    yield _metadata("thread_name", facts.rank, _ACTIONS_TID, name=f"actions, {facts.progress.phase.value}")
    for action in facts.progress.actions:
        begin_ns = taken_ns - round(action.for_s * 1e9)
        yield _lasting(facts.rank, _ACTIONS_TID, hook_words(action.name), begin_ns, taken_ns)
    line = next((location_of(frame) for frame in reversed(facts.stack) if frame.user), "")
    stopped_ns = taken_ns - round(facts.progress.idle_s * 1e9)
    yield _instant(facts.rank, _ACTIONS_TID, "last progress", stopped_ns, line=safe(line))
    if facts.exception is not None:
        yield _instant(facts.rank, _ACTIONS_TID, f"raised {safe(facts.exception.type)}", taken_ns)
    yield from _calls(facts, taken_ns)


def _calls(facts: RankFacts, taken_ns: int) -> Iterator[Event]:
    """A collective that has not ended lasts until now; of one that has, most back ends record only the call."""
    names = list(dict.fromkeys([*(group.name for group in facts.groups), *(call.group for call in facts.collectives)]))
    described = {group.name: group.description for group in facts.groups}
    for tid, name in enumerate(names, _FIRST_GROUP_TID):
        title = f"collectives of {safe(described.get(name) or name)}"
        yield _metadata("thread_name", facts.rank, tid, name=title)
        yield from _group_calls(facts.rank, tid, [call for call in facts.collectives if call.group == name], taken_ns)


def _group_calls(rank: int, tid: int, calls: list[Collective], taken_ns: int) -> Iterator[Event]:
    free_ns = 0
    for call in calls:
        about = {"seq": call.seq, "call": safe(call_words(call)), "backend": safe(call.backend)}
        if not call.created_ns:
            continue
        # On a device they run one after the other; events of a thread must not overlap.
        begin_ns = max(call.created_ns, free_ns)
        if not call.completed:
            yield _lasting(rank, tid, f"waits in {call.op}", begin_ns, taken_ns, **about)
        elif call.duration_ms is not None:
            free_ns = begin_ns + round(call.duration_ms * 1e6)
            yield _lasting(rank, tid, call.op, begin_ns, free_ns, **about)
        else:
            yield _instant(rank, tid, safe(call.op), call.created_ns, **about)


def _names(rank: int, name: str) -> Iterator[Event]:
    yield _metadata("process_name", rank, 0, name=name)
    yield _metadata("process_sort_index", rank, 0, sort_index=rank)


def _metadata(what: str, rank: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}


def _instant(rank: int, tid: int, name: str, ns: int, **args: object) -> Event:
    return {"ph": "i", "s": "t", "name": name, "pid": rank, "tid": tid, "ts": ns, "args": args}


def _lasting(rank: int, tid: int, name: str, begin_ns: int, end_ns: int, **args: object) -> Event:
    taken = max(end_ns - begin_ns, 0) / 1000
    return {"ph": "X", "name": safe(name), "pid": rank, "tid": tid, "ts": begin_ns, "dur": taken, "args": args}
