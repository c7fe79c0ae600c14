"""One rank's part in an incident: it contributes its facts, waits for the verdict, and acts on it."""

from contextlib import suppress
from dataclasses import replace

from lightning_ncclsafe.exchange import ExchangeError
from lightning_ncclsafe.facts import Incident, IncidentKind, JobFacts, RankFacts
from lightning_ncclsafe.guard.after_verdict import AfterVerdict
from lightning_ncclsafe.guard.ending import AT_LIMIT_S
from lightning_ncclsafe.guard.gathering import Gathering
from lightning_ncclsafe.guard.local_ranks import LocalRanks
from lightning_ncclsafe.guard.rank_hosts import RankHosts
from lightning_ncclsafe.guard.reporter import Reporter, Verdict
from lightning_ncclsafe.guard.shared import GuardedRank, IncidentEntry
from lightning_ncclsafe.guard.stuck import StuckDetector
from lightning_ncclsafe.rules.kit.activity import activity

# A rank is part of a stall if it has made no progress for this share of the first rank's time without progress.
_AS_LONG = 0.5
# By how much time exceptions of ranks that all raise the same may differ, so that they do not look like one rank's.
_SAME_EXCEPTION_S = 2.0


class Participation:
    """What one rank does for each entry of the log of incidents. Belongs to the watchdog's thread."""

    def __init__(
        self,
        own: GuardedRank,
        *,
        local_ranks: LocalRanks,
        rank_hosts: RankHosts,
        detector: StuckDetector,
        reporter: Reporter,
        after_verdict: AfterVerdict,
    ) -> None:
        self._own = own
        self._local_ranks = local_ranks
        self._rank_hosts = rank_hosts
        self._detector = detector
        self._reporter = reporter
        self._after_verdict = after_verdict

    def take_part(self, entry: IncidentEntry, idle_s: float) -> None:
        """Answers for this rank, waits for the verdict and acts on it."""
        incident, state = entry.incident, self._own.state
        if entry.recovered_after_s is not None:
            self._close_incident(incident, entry.recovered_after_s)
            return
        self._detector.note_idle(idle_s)
        before, state.open_incident = state.open_incident, incident
        if incident.kind is IncidentKind.TIMEOUT and self._own.limits.on_timeout == "abort":
            # The storage that the report is written to may hang itself.
            self._own.ending.exit_within(AT_LIMIT_S)
        verdict = self._gather(incident, idle_s)
        if verdict is not None and not verdict.ends_run:
            self._own.ending.lift_deadline()
        self._own.incidents.note(incident.number if verdict is not None and verdict.is_reported else 0)
        if entry.is_leaving:
            # No rank waits: for the ranks that still work, this is no incident.
            state.open_incident = before
            state.leaving_is_reported.set()
        elif verdict is not None and verdict.is_joint and not verdict.ends_run:
            # Likewise: no rank still trains.
            state.open_incident, state.verdict = before, verdict
        elif verdict is not None and verdict.quiet_s > 0:
            state.open_incident = before
            self._detector.be_quiet_for(verdict.quiet_s)
        else:
            self._detector.count(incident.kind)
            state.verdict = verdict or state.verdict
            self._say_on_other_hosts(verdict)
            if state.ends_run:
                self._after_verdict.follow_verdict(incident.kind)

    def _close_incident(self, incident: Incident, after_s: float) -> None:
        was_reported = self._own.state.open_incident is not None and not self._own.ending.is_closed
        self._own.forget_incident()
        if self._own.place.rank == 0 and was_reported:
            self._own.say(f"recovered after {after_s:.0f} s (incident {incident.number})")

    def _say_on_other_hosts(self, verdict: Verdict | None) -> None:
        """Prints why the run ends, on the first rank of each host but the one where the report is printed."""
        is_first, here = self._own.place.local_rank == 0, self._own.probe.info.host
        if verdict is not None and verdict.ends_run and is_first and verdict.reported_on not in ("", here):
            where = f"; report on {verdict.reported_on}: {verdict.folder}" if verdict.folder else ""
            answer = verdict.answer.rstrip(".") if where else verdict.answer
            self._own.say(f"rank {self._own.place.rank}: ending the run: {answer}{where}")

    def _gather(self, incident: Incident, idle_s: float) -> Verdict | None:
        state, connection = self._own.state, self._own.connection
        if incident.kind is IncidentKind.EXCEPTION and not activity(self._own.probe.snapshot(idle_s)).waits_for_peers:
            # Often, this rank is about to raise the same a moment later.
            state.main_thread_left.wait(_SAME_EXCEPTION_S)
        # Does nothing once all ranks have published their info.
        self._local_ranks.search()
        position = self._own.probe.position()
        facts = self._own.probe.look(idle_s)
        is_held_up = _is_held_up(incident, facts)
        gathering = Gathering(
            connection.exchange,
            round_number=connection.log.number,
            rank=self._own.place.rank,
            world_size=self._own.place.world_size,
            peers=self._own.probe.peers.known,
            witness=self._own.probe.peers.witness,
            is_dropped=lambda: state.is_off or connection.is_superseded,
            publish_info=connection.has_joined,
            # A rank that raises leaves its actions, too.
            has_moved=lambda: (
                is_held_up and self._own.probe.exception is None and self._own.probe.position() != position
            ),
        )
        try:
            gathering.publish(facts)
            verdict = gathering.hold(incident, self._report)
            if not connection.has_joined:
                with suppress(ExchangeError):
                    state.answered = gathering.answered()
            return verdict
        except ExchangeError as error:
            if state.is_off:
                return None
            alone = JobFacts(
                incident=incident, world_size=self._own.place.world_size, ranks=(facts,), missing=(str(error),)
            )
            return self._report(alone)
        finally:
            if facts.exception is not None:
                state.exception_is_reported.set()

    def _report(self, job: JobFacts) -> Verdict:
        known = self._own.state.verdict
        is_same = known is not None and known.incident.number == job.incident.number
        verdict = self._reporter.report(self._rank_hosts.complete(job), known=known if is_same else None)
        return replace(verdict, reported_on=self._own.probe.info.host)


def _is_held_up(incident: Incident, facts: RankFacts) -> bool:
    """Whether a rank is part of a stall: has made no progress for about as long as the one that reported it."""
    is_stall = incident.kind in (IncidentKind.SUSPECT, IncidentKind.TIMEOUT)
    return is_stall and facts.progress.idle_s >= _AS_LONG * incident.idle_s
