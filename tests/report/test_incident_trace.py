"""The trace of an incident: a track for each rank, what it did and called, where it stopped; events that nest."""

import json
from dataclasses import replace
from typing import Any

import pytest
from incidents import STALL_S, incident_of, poisoned

from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.trace.incident import render_trace

Event = dict[str, Any]


def trace(diagnosis: Diagnosis) -> dict[str, Any]:
    return dict(json.loads(render_trace(diagnosis)))


def events(diagnosis: Diagnosis, **wanted: object) -> list[Event]:
    return [event for event in trace(diagnosis)["traceEvents"] if wanted.items() <= event.items()]


def test_every_rank_has_a_track_even_without_an_answer() -> None:
    named = events(incident_of(4, silent=(3,)), name="process_name")
    told = [event["args"]["name"] for event in named]
    assert told == ["rank 0 (node-000)", "rank 1 (node-000)", "rank 2 (node-000)", "rank 3 (did not answer)"]


def test_a_track_shows_the_last_action_and_progress() -> None:
    (doing,) = events(incident_of(2), pid=0, name="Net.on_train_epoch_end")
    assert (doing["ph"], doing["dur"]) == ("X", STALL_S * 1e6)
    (stopped,) = events(incident_of(2), pid=0, name="last progress")
    assert stopped["ts"] == pytest.approx(doing["ts"], abs=1)
    assert stopped["args"]["line"] == "/home/me/project/model.py:93 in evaluate"


def test_open_collectives_last_until_now() -> None:
    (waits,) = events(incident_of(2), pid=1, name="waits in all_reduce")
    assert waits["args"]["seq"] == 346 and waits["dur"] == pytest.approx((STALL_S - 0.25) * 1e6, rel=0.001)
    assert not events(incident_of(2), pid=0, name="waits in all_reduce")
    assert len(events(incident_of(2), pid=1, name="all_reduce")) == 63


def test_the_answer_is_in_the_file() -> None:
    about = trace(incident_of(2))["otherData"]
    assert about["answer"].startswith("rank-zero-only-work: Rank 0 is working alone")
    assert about["start"].startswith("2026-11-21T16:") and about["clock"] == "each host's own"


def with_durations(diagnosis: Diagnosis) -> Diagnosis:
    """Collectives that take longer than the time between their calls, as those queued on a device do."""

    def timed(facts: Any) -> Any:
        calls = tuple(replace(call, duration_ms=900.0) for call in facts.collectives)
        return replace(facts, collectives=calls)

    job = diagnosis.job
    return replace(diagnosis, job=replace(job, ranks=tuple(map(timed, job.ranks))))


@pytest.mark.parametrize("make", [incident_of, lambda world: with_durations(incident_of(world))], ids=["gloo", "timed"])
def test_events_of_a_thread_nest(make: Any) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events(make(2), ph="X"):
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        for begin, end in spans:
            assert not [other for other in spans if begin + 1e-3 < other[0] < end - 1e-3 and other[1] > end + 1e-3]
    assert min(event["ts"] for event in events(make(2)) if "ts" in event) == 0


def test_hostile_text_stays_text() -> None:
    said: list[str] = []

    def heard(pairs: list[tuple[str, Any]]) -> None:
        said.extend(value for _, value in pairs if isinstance(value, str))

    json.loads(render_trace(poisoned(incident_of(4, silent=(3,)))), object_pairs_hook=heard)
    assert any("\\x1b[2J" in text for text in said)
    assert not [char for text in said for char in text if not char.isprintable()]
