"""Learned suspicion and limits by phase, as the guards of several ranks keep them."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from standing import in_agreement
from thread_ranks import COMPILE, Job, wait_on_all_but

from lightning_ncclsafe.facts import Frame, IncidentKind, Phase
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard import stuck, thresholds
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.guard.shared import IncidentEntry
from lightning_ncclsafe.rules.kit import expected

LONG_S = 1.5


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes; nothing is learned here before there are batches, so the minute counts."""
    monkeypatch.setattr(thresholds, "UNKNOWN_S", 0.2)
    monkeypatch.setattr(expected, "LONG_S", LONG_S)
    monkeypatch.setattr(stuck, "LONG_S", LONG_S)


def count_rounds(job: Job) -> threading.Semaphore:
    """Goes up by one with every verdict that there is to be quiet."""
    rounds = threading.Semaphore(0)
    for guard in job.guards:
        be_quiet = guard._detector.be_quiet_for
        guard._detector.be_quiet_for = lambda s, be_quiet=be_quiet: (be_quiet(s), rounds.release())[0]  # type: ignore[method-assign]
    return rounds


def test_nothing_is_said_while_the_rank_that_others_wait_for_compiles(make_job: Callable[..., Job]) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    job.probes[0].compiles = True
    job.start()
    rounds = count_rounds(job)
    for _ in range(3):
        assert rounds.acquire(timeout=20), "all ranks have heard"
    assert not job.said
    assert not job.folder.exists()
    assert all(guard._state.open_incident is None and guard._detector._suspicions == 0 for guard in job.guards)
    assert [numbers.last for numbers in job.incidents] == [0, 0, 0]
    # Training goes on: that is no recovery, as nothing was said.
    for probe in job.probes:
        probe.waits, probe.batch = False, 1
    wait_on_all_but(job, 1)
    job.wait_for(lambda: len(job.said) == 1)
    assert "recovered" not in job.said[0]
    (report,) = job.reports()
    assert report["findings"][0]["ranks"] == [1]  # type: ignore[index]
    assert report["job"]["incident"]["number"] == 1  # type: ignore[index,call-overload]


def test_ranks_that_wait_for_prepare_data_do_not_ask_before_that_takes_long(make_job: Callable[..., Job]) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    for probe in job.probes:
        probe.awaits_preparation = True
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["findings"][0]["ranks"] == [0]  # type: ignore[index]
    assert report["job"]["incident"]["idle_s"] >= LONG_S  # type: ignore[index,call-overload]
    assert [guard._detector._quiet_rounds for guard in job.guards] == [0, 0, 0], "nobody has been asked before that"


def test_when_it_has_compiled_for_too_long_that_is_said(make_job: Callable[..., Job]) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    job.probes[0].compiles = True
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["findings"][0]["ranks"] == [0]  # type: ignore[index]
    assert report["job"]["incident"]["idle_s"] >= LONG_S  # type: ignore[index,call-overload]
    assert [guard._detector._quiet_rounds for guard in job.guards] == [1, 1, 1], "nobody asks again before that"
    for probe in job.probes:
        probe.waits, probe.batch = False, 1
    job.wait_for(lambda: len(job.said) == 2)
    assert job.said[1].startswith("recovered after")


def test_a_rank_that_does_what_is_usual_is_named_at_once(make_job: Callable[..., Job]) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["job"]["incident"]["idle_s"] < LONG_S  # type: ignore[index,call-overload]
    assert report["job"]["incident"]["suspect_after_s"] == 0.2  # type: ignore[index,call-overload]


def test_an_explicit_threshold_knows_no_excuse(make_job: Callable[..., Job]) -> None:
    job = make_job()
    wait_on_all_but(job, 0)
    job.probes[0].compiles = True
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    assert job.reports()[0]["job"]["incident"]["idle_s"] < LONG_S  # type: ignore[index]


def test_nor_does_the_hard_limit(make_job: Callable[..., Job]) -> None:
    job = make_job(learned=True, timeout_s=1.0)
    wait_on_all_but(job, 0)
    job.probes[0].compiles = True
    job.start()
    job.wait_for(lambda: set(job.ended) == {0, 1, 2})
    assert [report["job"]["incident"]["kind"] for report in job.reports()] == ["timeout"]  # type: ignore[index,call-overload]


def test_nor_does_an_exception(make_job: Callable[..., Job]) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0, 2)
    job.probes[0].compiles = True
    job.start()
    assert job.guards[2].failed(ValueError("the batch is broken")) is None
    assert job.reports()[0]["findings"][0]["rule"] == "failed-rank"  # type: ignore[index]


def test_a_rank_that_waits_while_it_compiles_itself_asks_nobody(make_job: Callable[..., Job]) -> None:
    """As on NCCL: a collective is under way on the device, and the main thread has gone on to compile."""
    job = make_job(learned=True, world_size=1)
    (probe,) = job.probes
    probe.waits = True
    facts = probe.snapshot(1.0)
    assert facts.stack
    job.start()
    detector = job.guards[0]._detector
    compiling = replace(facts, stack=(*facts.stack, COMPILE))
    assert detector._is_expected(1.0, compiling)
    assert not detector._is_expected(1.0, facts)
    assert not detector._is_expected(LONG_S, compiling)
    detector._limits = replace(detector._limits, learned=False)
    assert not detector._is_expected(1.0, compiling)


def test_after_very_many_quiet_rounds_ranks_are_asked_later(make_job: Callable[..., Job]) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    job.start()
    for guard in job.guards:
        guard._detector._quiet_rounds = stuck.MAX_QUIET_ROUNDS
    job.wait_for(lambda: len(job.said) == 1)
    assert job.reports()[0]["job"]["incident"]["idle_s"] >= LONG_S  # type: ignore[index]


def test_a_rank_is_ended_at_the_limit_of_the_phase_it_waits_in(make_job: Callable[..., Job]) -> None:
    job = make_job(on_timeout="report")
    job.limits = replace(job.limits, phases_s={"checkpoint": 0.6})
    job.moments = [
        PhaseKind(phase=Phase.CHECKPOINT) if rank == 2 else phase_kind for rank, phase_kind in enumerate(job.moments)
    ]
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 2)
    incident = job.reports()[0]["job"]["incident"]  # type: ignore[index]
    assert (incident["kind"], incident["opened_by"], incident["timeout_s"]) == ("timeout", 2, 0.6)


def test_a_run_that_is_not_ended_at_the_limit_has_so_many_reports_of_it(make_job: Callable[..., Job]) -> None:
    """Of a year of standstills nobody reads a report each, and each would be a folder."""
    job = make_job(world_size=1, timeout_s=0.6, on_timeout="report")
    job.probes[0].waits = True
    job.start(without=0)
    (guard,) = job.guards
    detector = guard._detector
    detector._suspicions = stuck.MAX_SUSPICIONS
    assert detector.reason(1000.0) is IncidentKind.TIMEOUT
    detector._reports_at_limit = stuck.MAX_REPORTS_AT_LIMIT
    assert detector.reason(2000.0) is None
    detector._limits = replace(detector._limits, on_timeout="abort")
    assert detector.reason(3000.0) is IncidentKind.TIMEOUT, "a run is ended however often it was not"


def test_without_a_phase_of_its_own_the_same_rank_waits_on(make_job: Callable[..., Job]) -> None:
    job = make_job(on_timeout="report")
    job.limits = replace(job.limits, phases_s={"validate": 0.6})
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    job.guards[1]._watchdog.wake()
    incident = job.reports()[0]["job"]["incident"]  # type: ignore[index]
    assert (incident["kind"], incident["timeout_s"]) == ("suspect", 1000.0)


def test_a_recovery_of_which_nothing_was_told_is_not_told(make_job: Callable[..., Job]) -> None:
    """Written by a rank that has missed the verdict, and so believes that the incident is open."""
    job = make_job(world_size=1)
    job.start()
    (guard,) = job.guards
    incident = guard._detector.incident(IncidentKind.SUSPECT, 0.3)
    guard._participation.take_part(IncidentEntry(incident=incident, recovered_after_s=3.0), 0.0)
    assert not job.said
    guard._state.open_incident = incident
    guard._participation.take_part(IncidentEntry(incident=incident, recovered_after_s=3.0), 0.0)
    assert job.said == ["recovered after 3 s (incident 1)"]


def test_what_moves_a_rank_that_is_being_ended_is_no_recovery(make_job: Callable[..., Job]) -> None:
    """Saving moves it, and so does a collective that breaks as the failed rank leaves."""
    job = make_job(world_size=1)
    job.start(without=0)
    (guard,) = job.guards
    state, incident = guard._state, guard._detector.incident(IncidentKind.EXCEPTION, 10.0)
    state.open_incident, state.verdict = incident, Verdict(incident=incident, answer="rank 1 raised", ends_run=True)
    guard._ended_run.leave()
    assert [guard._detector.recovery(idle_s) for idle_s in (10.0, 10.25, 0.1, 0.2)] == [None] * 4
    # Written by another rank, which is not being ended yet.
    guard._participation.take_part(IncidentEntry(incident=incident, recovered_after_s=3.0), 0.0)
    assert not job.said
    assert str(state.error()).startswith("rank 1 raised")


def test_a_standstill_that_ended_before_the_incident_is_not_taken_for_its_end(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=1)
    job.start(without=0)
    (guard,) = job.guards
    assert guard._detector.recovery(75.0) is None
    assert [guard._detector.recovery(idle_s) for idle_s in (0.1, 0.1, 10.0)] == [None] * 3
    guard._state.open_incident = guard._detector.incident(IncidentKind.SUSPECT, 10.0)
    assert [guard._detector.recovery(idle_s) for idle_s in (10.25, 10.5, 0.1)] == [None] * 3
    recovery = guard._detector.recovery(0.2)
    assert recovery is not None and recovery.recovered_after_s == 10.5
    assert guard._detector.recovery(0.3) is None


def test_a_rank_that_takes_part_in_its_first_tick_knows_that_it_stood_still(make_job: Callable[..., Job]) -> None:
    job = make_job(world_size=1)
    job.start(without=0)
    (guard,) = job.guards
    guard._participation.take_part(IncidentEntry(incident=guard._detector.incident(IncidentKind.SUSPECT, 5.0)), 5.0)
    assert guard._detector.recovery(0.1) is None
    assert guard._detector.recovery(0.2) is not None


def test_ranks_that_wait_in_code_of_ours_are_suspected_and_timed_out(make_job: Callable[..., Job]) -> None:
    """In the comparison of their loaders, for rank 0: nothing is outstanding in the recorder."""
    job = make_job(learned=False, timeout_s=2.0, on_timeout="report")
    for probe in job.probes[1:]:
        probe.stands_in = in_agreement()
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert (report["findings"][0]["rule"], report["findings"][0]["ranks"]) == ("rank-zero-only-work", [0])  # type: ignore[index]
    assert "own-code" not in {finding["rule"] for finding in report["findings"]}  # type: ignore[attr-defined]
    job.wait_for(lambda: len(job.said) == 2)
    assert [report["job"]["incident"]["kind"] for report in job.reports()] == ["timeout"]  # type: ignore[index,call-overload]


ALONE = (
    Frame(file="/home/me/train.py", line=40, function="training_step", user=True),
    Frame(file="/usr/lib/python3.11/queue.py", line=171, function="get"),
    Frame(file="/usr/lib/python3.11/threading.py", line=327, function="wait"),
)


@pytest.mark.parametrize("learned", [False, True])
def test_ranks_that_all_wait_for_threads_of_their_own_are_told(make_job: Callable[..., Job], learned: bool) -> None:
    """Where patience is learned, not before it takes long: such a thread mostly only takes its time."""
    job = make_job(learned=learned)
    for probe in job.probes:
        probe.stands_in = ALONE
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert (report["findings"][0]["rule"], report["findings"][0]["ranks"]) == ("rank-behind", [0, 1, 2])  # type: ignore[index]
    assert (report["job"]["incident"]["idle_s"] >= LONG_S) is learned  # type: ignore[index,call-overload]


def test_nothing_is_said_of_a_rank_that_waits_for_a_thread_of_its_own(make_job: Callable[..., Job]) -> None:
    job = make_job()
    job.probes[1].stands_in = ALONE
    job.start()
    rounds = count_rounds(job)
    for _ in range(3):
        assert rounds.acquire(timeout=20), "all ranks have heard"
    assert not job.said
