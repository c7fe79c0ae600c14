"""When one rank decides that it is stuck, and when that is over."""

import pytest
from thread_ranks import BROADCAST, COMPILE, HandMadeProbe

from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.facts import Frame, IncidentKind, Phase
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard import stuck, thresholds
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.guard.local_ranks import LocalRanks
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.guard.shared import Connection, GuardedRank, GuardState, Place
from lightning_ncclsafe.guard.stuck import StuckDetector
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.settings import Limits, OnTimeout

LONG_S = 1.5


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds instead of minutes."""
    monkeypatch.setattr(thresholds, "UNKNOWN_S", 0.2)
    monkeypatch.setattr(stuck, "LONG_S", LONG_S)


class Rank:
    """A rank that has joined a process group of one and waits in a collective, with what its detector looks at."""

    def __init__(
        self,
        *,
        learned: bool = False,
        timeout_s: float = 1000.0,
        on_timeout: OnTimeout = "abort",
        phases_s: dict[str, float] | None = None,
    ) -> None:
        self.state, self.ending = GuardState(), Ending()
        self.probe = HandMadeProbe(0, 1)
        self.probe.waits = True
        connection = Connection(MemoryExchange(), not_before_ns=0)
        connection.connect(MemoryExchange())
        connection.change_over()
        place = Place(rank=0, local_rank=0, world_size=1, local_world_size=1)
        own = GuardedRank(
            place=place,
            limits=Limits(
                suspect_after_s=0.1,
                timeout_s=timeout_s,
                on_timeout=on_timeout,
                learned=learned,
                phases_s=phases_s or {},
            ),
            state=self.state,
            connection=connection,
            probe=self.probe,  # type: ignore[arg-type]
            ending=self.ending,
            incidents=IncidentNumbers(),
            phase_kind=lambda: (PhaseKind(phase=Phase.TRAIN, per_batch=True), 7),
            say=print,
        )
        local_ranks = LocalRanks(place, self.probe.peers, host="node")  # type: ignore[arg-type]
        self.detector = StuckDetector(own, local_ranks, lambda: None)

    def recovers(self, *idle_s: float) -> list[float | None]:
        """For each of these ticks of the watchdog, the length of the standstill that the rank reports as over."""
        entries = [self.detector.recovery(one) for one in idle_s]
        return [entry.recovered_after_s if entry is not None else None for entry in entries]


def test_a_rank_that_waits_while_it_compiles_itself_asks_nobody() -> None:
    """As on NCCL: a collective is under way on the device, and the main thread has gone on to compile."""
    one = Rank(learned=True)
    assert one.detector.reason(1.0) is IncidentKind.SUSPECT
    one = Rank(learned=True)
    one.probe.stands_in = (BROADCAST, COMPILE)
    assert one.detector.reason(1.0) is None
    assert one.detector.reason(LONG_S + 1.0) is IncidentKind.SUSPECT


@pytest.mark.parametrize(
    ("slept_s", "has_lock", "kind"),
    [
        (None, False, None),
        (9.0, False, None),
        (11.0, False, IncidentKind.SUSPECT),
        (None, True, IncidentKind.SUSPECT),
    ],
)
def test_a_rank_whose_own_wait_nothing_can_end_asks_although_nobody_waits_for_it(
    slept_s: float | None, has_lock: bool, kind: IncidentKind | None
) -> None:
    one = Rank(learned=True)
    one.probe.waits, one.probe.slept_s, one.probe.has_own_lock = False, slept_s, has_lock
    one.probe.stands_in = (Frame(file="/home/me/train.py", line=7, function="fetch", user=True),)
    assert one.detector.reason(1.0) is kind


def test_with_an_explicit_threshold_it_asks() -> None:
    one = Rank()
    one.probe.stands_in = (BROADCAST, COMPILE)
    assert one.detector.reason(1.0) is IncidentKind.SUSPECT


def test_after_very_many_quiet_rounds_ranks_are_asked_later() -> None:
    one = Rank(learned=True)
    for _ in range(stuck.MAX_QUIET_ROUNDS):
        one.detector.be_quiet_for(0.0)
    assert one.detector.reason(1.0) is None
    assert one.detector.reason(LONG_S + 1.0) is IncidentKind.SUSPECT


@pytest.mark.parametrize(("on_timeout", "then"), [("report", None), ("abort", IncidentKind.TIMEOUT)])
def test_the_limit_is_reported_a_limited_number_of_times_unless_it_ends_the_run(
    on_timeout: OnTimeout, then: IncidentKind | None
) -> None:
    """Nobody reads a report for each standstill of a year, and each would be a folder."""
    one = Rank(timeout_s=0.6, on_timeout=on_timeout)
    for _ in range(stuck.MAX_SUSPICIONS):
        one.detector.count(IncidentKind.SUSPECT)
    assert one.detector.reason(1000.0) is IncidentKind.TIMEOUT
    for _ in range(stuck.MAX_REPORTS_AT_LIMIT):
        one.detector.count(IncidentKind.TIMEOUT)
    assert one.detector.reason(2000.0) is then


def test_progress_of_a_rank_that_is_being_ended_is_no_recovery() -> None:
    """Saving moves it, and so does a collective that breaks as the failed rank leaves."""
    one = Rank()
    incident = one.detector.incident(IncidentKind.EXCEPTION, 10.0)
    one.state.open_incident = incident
    one.state.verdict = Verdict(incident=incident, answer="rank 1 raised", ends_run=True)
    one.ending.close(one.state.error)
    assert one.recovers(10.0, 10.25, 0.1, 0.2) == [None] * 4


def test_a_standstill_that_ended_before_the_incident_is_not_taken_for_its_end() -> None:
    one = Rank()
    assert one.recovers(75.0, 0.1, 0.1, 10.0) == [None] * 4
    one.state.open_incident = one.detector.incident(IncidentKind.SUSPECT, 10.0)
    assert one.recovers(10.25, 10.5, 0.1, 0.2, 0.3) == [None, None, None, 10.5, None]


def test_a_rank_that_takes_part_in_its_first_tick_knows_that_it_stood_still() -> None:
    one = Rank()
    one.state.open_incident = one.detector.incident(IncidentKind.SUSPECT, 5.0)
    one.detector.note_idle(5.0)
    assert one.recovers(0.1, 0.2) == [None, 5.0]


@pytest.mark.parametrize(
    ("phases_s", "shortest_s"),
    [({}, 1000.0), ({"checkpoint": 20.0}, 20.0), ({"checkpoint": 3000.0}, 1000.0)],
)
def test_an_incident_tells_the_shortest_limit_of_all_phases(phases_s: dict[str, float], shortest_s: float) -> None:
    one = Rank(phases_s=phases_s)
    incident = one.detector.incident(IncidentKind.SUSPECT, 5.0)
    assert (incident.timeout_s, incident.shortest_timeout_s) == (1000.0, shortest_s)
    one.state.open_incident = incident
    at_limit = one.detector.incident(IncidentKind.TIMEOUT, 3001.0)
    assert (at_limit.number, at_limit.shortest_timeout_s) == (incident.number, shortest_s)
