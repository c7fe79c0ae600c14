"""Where a rank decides that it is stuck, and what it writes to the log of incidents, so that all ranks are asked."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lightning_ncclsafe.facts import Incident, IncidentKind, Phase, RankFacts
from lightning_ncclsafe.facts.phase_kinds import LONG_S
from lightning_ncclsafe.guard.local_ranks import LocalRanks
from lightning_ncclsafe.guard.shared import GuardedRank, IncidentEntry
from lightning_ncclsafe.guard.thresholds import Thresholds
from lightning_ncclsafe.rules.kit.activity import ASLEEP_S, Activity, activity
from lightning_ncclsafe.rules.kit.frames import is_compiling
from lightning_ncclsafe.rules.kit.landmarks import Kind

# A run whose ranks often wait this long for each other is slow, not stuck; more reports would only repeat these.
MAX_SUSPICIONS = 20
# The same for waits up to the limit, if that does not end the run.
MAX_REPORTS_AT_LIMIT = 20
# A round that reports nothing, because the wait is expected, leaves a few entries on the store. After this many rounds,
# ranks are asked only when they have waited for longer than expected.
MAX_QUIET_ROUNDS = 500
# A rank that waits by itself asks after this many times the threshold.
_ASKED_FIRST = 2
# A shorter pause between two ticks is no stall.
_LEAST_STALL_S = 0.025


class StuckDetector:
    """Decides whether a rank is stuck, and whether one that was stuck makes progress again.

    A rank is stuck if it waits for other ranks or for data for longer than :class:`Thresholds` allows in its phase,
    and nothing that it knows itself explains the wait; if it waits by itself, and nothing can end that; or if it waits
    by itself for even longer. A rank that works is never stuck, however long it works: the ranks that wait for it are.
    Belongs to the watchdog's thread.

    ``idle_s`` is always the time since this rank last made progress, seconds.

    Args:
        local_ranks: Knows whether a rank of this host ended before it joined.
        end_run: Called if this rank still waits although the run cannot continue.
    """

    def __init__(self, own: GuardedRank, local_ranks: LocalRanks, end_run: Callable[[], None]) -> None:
        self._own = own
        self._local_ranks = local_ranks
        self._end_run = end_run
        self._thresholds = Thresholds(own.limits)
        self._suspicions = 0
        self._reports_at_limit = 0
        self._quiet_rounds = 0
        # The length of the stall at the last tick, and of the one that had ended by then.
        self._idle_s = 0.0
        self._ended_s = 0.0

    @property
    def phase(self) -> Phase:
        """The phase that the Trainer was in at the last tick."""
        return self._thresholds.phase_kind.phase

    def observe(self, idle_s: float) -> None:
        """Learns from a tick of the watchdog what is usual."""
        self._thresholds.observe(idle_s, *self._own.phase_kind())

    def has_reason_before_joining(self, idle_s: float) -> bool:
        """Whether to read the log at all: before there is a store, it is in files whose storage may be the problem."""
        patience_s = self._thresholds.suspect_after_s(joined=False)
        return self._own.probe.exception is not None or self._local_ranks.has_lost or idle_s >= patience_s

    def entry(self, idle_s: float) -> IncidentEntry | None:
        """What this rank has to write to the log, if anything: it is stuck, has failed, leaves or has recovered."""
        if (recovery := self.recovery(idle_s)) is not None:
            return recovery
        if self._own.state.is_leaving and not self._own.state.leaving_is_reported.is_set():
            return IncidentEntry(incident=self.incident(IncidentKind.SUSPECT, idle_s), is_leaving=True)
        kind = self.reason(idle_s)
        return IncidentEntry(incident=self.incident(kind, idle_s)) if kind is not None else None

    def recovery(self, idle_s: float) -> IncidentEntry | None:
        """The end of the open incident, if this rank was stuck in it and makes progress again."""
        ended_s, self._ended_s = self._ended_s, self._idle_s if idle_s < self._idle_s else 0.0
        self._idle_s = idle_s
        incident = self._own.state.open_incident
        # Not only for the rank that opened it: that one may be gone.
        if incident is None or ended_s < max(incident.suspect_after_s, _LEAST_STALL_S):
            return None
        # A main thread that unwinds with an exception makes progress, too; at the next tick, the exception is known.
        if self._own.probe.exception is not None or self._own.ending.is_closed:
            return None
        return IncidentEntry(incident=incident, recovered_after_s=round(ended_s, 1))

    def reason(self, idle_s: float) -> IncidentKind | None:
        """Why all ranks must be asked what they are doing; None if there is no reason."""
        exception = self._own.probe.exception
        if exception is not None and not self._own.state.exception_is_reported.is_set():
            if not (exception.is_consequence and self._own.state.ends_run):
                return IncidentKind.EXCEPTION
            self._own.state.exception_is_reported.set()  # its cause has been reported meanwhile
        has_joined = self._own.connection.has_joined
        is_time = self._thresholds.is_time_to_look(idle_s, joined=has_joined)
        if not is_time and not self._local_ranks.has_lost:
            return None
        facts = self._own.probe.snapshot(idle_s)
        doing = activity(facts)
        if self._own.state.ends_run and doing.waits_for_peers:
            self._end_run()
        is_past_limit = self._thresholds.is_past_limit(idle_s, doing)
        is_at_limit = is_past_limit and not self._own.state.limit_is_reported
        if is_at_limit and (self._own.limits.on_timeout == "abort" or self._reports_at_limit < MAX_REPORTS_AT_LIMIT):
            return IncidentKind.TIMEOUT
        waits = doing.waits_for_peers or doing.waits_for_data or self._waits_alone_for_long(idle_s, doing)
        may_ask = self._own.state.open_incident is None and self._suspicions < MAX_SUSPICIONS
        may_ask = may_ask and (waits or (doing.kind is Kind.USER and self._cannot_go_on()))
        return IncidentKind.SUSPECT if may_ask and not self._is_expected(idle_s, facts) else None

    @property
    def _long_s(self) -> float:
        return min(LONG_S, self._thresholds.limit_s / 2)

    def _waits_alone_for_long(self, idle_s: float, doing: Activity) -> bool:
        """Whether it waits by itself, and for so long that other ranks would have asked if they waited for it."""
        long_s = (
            self._long_s if self._own.limits.learned else _ASKED_FIRST * self._thresholds.suspect_after_s(joined=True)
        )
        return doing.waits_alone and idle_s >= long_s

    def _cannot_go_on(self) -> bool:
        """Whether nothing can end its wait: it holds the file lock itself, or its threads wait for one another."""
        with suppress(Exception):  # what is unreadable is no reason
            slept_s = self._own.probe.asleep_s()
            return (slept_s is not None and slept_s >= ASLEEP_S) or self._own.probe.waits_for_own_lock()
        return False

    def _is_expected(self, idle_s: float, facts: RankFacts) -> bool:
        """Whether this rank itself knows why its stall, although unusual so far, needs no questions."""
        if self._thresholds.is_quiet:
            return True
        if not self._own.limits.learned or idle_s >= self._long_s:
            return False
        if self._quiet_rounds >= MAX_QUIET_ROUNDS or is_compiling(facts.stack):
            return True
        # Lightning lets the others wait for prepare_data without limit, but a rank that is gone is no reason to wait.
        return activity(facts).exempt and not self._local_ranks.has_lost

    def incident(self, kind: IncidentKind, idle_s: float) -> Incident:
        """The incident that this rank opens; at the limit it is the one that is open already."""
        idle_s, limit_s = round(idle_s, 1), self._thresholds.limit_s
        known = self._own.state.open_incident
        if kind is IncidentKind.TIMEOUT and known is not None:
            return replace(known, kind=kind, opened_by=self._own.place.rank, idle_s=idle_s, timeout_s=limit_s)
        return Incident(
            number=self._own.incidents.last + 1,
            kind=kind,
            opened_by=self._own.place.rank,
            opened_ns=time.time_ns(),
            idle_s=idle_s,
            suspect_after_s=round(self._thresholds.suspect_after_s(joined=True), 3),
            timeout_s=limit_s,
            shortest_timeout_s=self._own.limits.shortest_s,
        )

    # The outcome of an incident.

    def note_idle(self, idle_s: float) -> None:
        """Notes the length of the stall: this rank takes part in an incident, and does not measure meanwhile."""
        self._idle_s = max(self._idle_s, idle_s)

    def be_quiet_for(self, quiet_s: float) -> None:
        """Treats the rank as not stuck for this many seconds: what it waits for is known to take that long."""
        self._quiet_rounds += 1
        self._thresholds.be_quiet_for(quiet_s)

    def count(self, kind: IncidentKind) -> None:
        """Counts a reported incident."""
        self._suspicions += kind is IncidentKind.SUSPECT
        self._reports_at_limit += kind is IncidentKind.TIMEOUT
