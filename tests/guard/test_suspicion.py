"""Learned suspicion and limits by phase, as the guards of several ranks keep them."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from standing import in_agreement
from thread_ranks import Job, wait_on_all_but

from lightning_ncclsafe.facts import Frame, Incident, IncidentKind, Phase
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard import stuck, thresholds
from lightning_ncclsafe.guard.participation import Participation
from lightning_ncclsafe.guard.shared import IncidentEntry, IncidentLog
from lightning_ncclsafe.guard.stuck import StuckDetector
from lightning_ncclsafe.rules import expected_waits

LONG_S = 1.5


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes; nothing is learned here before there are batches, so the minute counts."""
    monkeypatch.setattr(thresholds, "UNKNOWN_S", 0.2)
    monkeypatch.setattr(expected_waits, "LONG_S", LONG_S)
    monkeypatch.setattr(expected_waits, "PASSING_S", 0.2)
    monkeypatch.setattr(stuck, "LONG_S", LONG_S)


@pytest.fixture
def quiet_rounds(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Goes up by one with every rank that learns that there is nothing to report."""
    rounds, be_quiet_for = threading.Semaphore(0), StuckDetector.be_quiet_for

    def counted(detector: StuckDetector, quiet_s: float) -> None:
        be_quiet_for(detector, quiet_s)
        rounds.release()

    monkeypatch.setattr(StuckDetector, "be_quiet_for", counted)
    return rounds


def count_of(rounds: threading.Semaphore) -> int:
    return next(count for count in itertools.count() if not rounds.acquire(blocking=False))


class Log:
    """The log of incidents as another rank sees it, which writes that one is over."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log = IncidentLog(job.exchanges[0])
        self._answered = threading.Semaphore(0)
        take_part = Participation.take_part

        def counted(participation: Participation, entry: IncidentEntry, idle_s: float) -> None:
            take_part(participation, entry, idle_s)
            if entry.recovered_after_s is not None:
                self._answered.release()

        monkeypatch.setattr(Participation, "take_part", counted)

    def write_recovery(self) -> None:
        incident = Incident(number=1, kind=IncidentKind.SUSPECT, opened_by=0, opened_ns=time.time_ns(), idle_s=3.0)
        entry = IncidentEntry(incident=incident, recovered_after_s=3.0)
        while self._log.write(entry) != entry:
            self._log.number += 1
        assert self._answered.acquire(timeout=20)


def test_nothing_is_reported_while_the_rank_that_others_wait_for_compiles(
    make_job: Callable[..., Job], quiet_rounds: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Quiet rounds do not count as suspicions.
    monkeypatch.setattr(stuck, "MAX_SUSPICIONS", 1)
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    job.probes[0].compiles = True
    job.start()
    for _ in range(3):
        assert quiet_rounds.acquire(timeout=20), "all ranks have heard"
    assert not job.said
    assert not job.folder.exists()
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


def test_ranks_that_wait_for_prepare_data_do_not_ask_before_that_takes_long(
    make_job: Callable[..., Job], quiet_rounds: threading.Semaphore
) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    for probe in job.probes:
        probe.awaits_preparation = True
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["findings"][0]["ranks"] == [0]  # type: ignore[index]
    assert report["job"]["incident"]["idle_s"] >= LONG_S  # type: ignore[index,call-overload]
    assert count_of(quiet_rounds) == 0, "nobody has been asked before that"


def test_when_it_has_compiled_for_too_long_that_is_reported(
    make_job: Callable[..., Job], quiet_rounds: threading.Semaphore
) -> None:
    job = make_job(learned=True)
    wait_on_all_but(job, 0)
    job.probes[0].compiles = True
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert report["findings"][0]["ranks"] == [0]  # type: ignore[index]
    assert report["job"]["incident"]["idle_s"] >= LONG_S  # type: ignore[index,call-overload]
    assert count_of(quiet_rounds) == 3, "nobody asks again before that"
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


def test_without_a_phase_of_its_own_the_same_rank_waits_on(make_job: Callable[..., Job]) -> None:
    job = make_job(on_timeout="report")
    job.limits = replace(job.limits, phases_s={"validate": 0.6})
    wait_on_all_but(job, 0)
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    incident = job.reports()[0]["job"]["incident"]  # type: ignore[index]
    assert (incident["kind"], incident["timeout_s"]) == ("suspect", 1000.0)


def test_a_recovery_is_not_reported_where_the_incident_was_not(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by a rank that has missed the verdict, and so believes that the incident is open."""
    job = make_job(world_size=1)
    log = Log(job, monkeypatch)
    job.start()
    log.write_recovery()
    assert not job.said
    job.probes[0].waits = True
    job.wait_for(lambda: len(job.said) == 1)
    log.write_recovery()
    assert job.said[1:] == ["recovered after 3 s (incident 1)"]


def test_a_recovery_that_another_rank_saw_changes_nothing_for_one_that_is_being_ended(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(world_size=1, timeout_s=0.6)
    log = Log(job, monkeypatch)
    job.probes[0].waits = True
    job.start()
    job.wait_for(lambda: job.ended == [0])
    said = [*job.said]
    log.write_recovery()
    assert job.said == said
    assert job.guards[0].ends_run


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
def test_ranks_that_all_wait_for_their_own_threads_are_reported(make_job: Callable[..., Job], learned: bool) -> None:
    """Where patience is learned, not before it takes long: such a thread mostly only takes its time."""
    job = make_job(learned=learned)
    for probe in job.probes:
        probe.stands_in = ALONE
    job.start()
    job.wait_for(lambda: len(job.said) == 1)
    (report,) = job.reports()
    assert (report["findings"][0]["rule"], report["findings"][0]["ranks"]) == ("rank-behind", [0, 1, 2])  # type: ignore[index]
    assert (report["job"]["incident"]["idle_s"] >= LONG_S) is learned  # type: ignore[index,call-overload]


def test_a_rank_that_waits_for_its_own_thread_is_not_reported(
    make_job: Callable[..., Job], quiet_rounds: threading.Semaphore
) -> None:
    job = make_job()
    job.probes[1].stands_in = ALONE
    job.start()
    for _ in range(3):
        assert quiet_rounds.acquire(timeout=20), "all ranks have heard"
    assert not job.said
