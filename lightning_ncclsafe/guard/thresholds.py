"""How long a rank may make no progress before it is looked at, and before the run is ended."""

import time
from collections.abc import Callable

from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard.idle_times import FLOOR_S, IdleTimes
from lightning_ncclsafe.rules.kit.activity import Activity
from lightning_ncclsafe.settings import BACKSTOP_S, Limits

# What processes are given to start before the first meeting, however soon the user wants to know.
START_UP_S = 30.0
# How often a rank that makes no progress, but waits for no other, is looked at again: a look takes some 30 ms.
_LOOK_S = 1.0
_RARELY_S = 10.0
# Timeouts that process groups have when nobody gives them one: PyTorch's for NCCL, and for all other back ends.
DEFAULT_TIMEOUTS_S = frozenset({600.0, 1800.0})


class Thresholds:
    """Decides when to look and when to end, for one rank. Belongs to the watchdog's thread.

    Args:
        limits: What the user has set.
        clock: Seconds that only grow; for tests.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._idle_times = IdleTimes()
        self._looked_at_s = 0.0
        self._idle_s = 0.0
        self._quiet_until_s = 0.0
        every = {limits.limit_s(phase) for phase in limits.phases_s} | {limits.timeout_s}
        # With limits of phases no group is left at one of these; what was called a moment before may still have it.
        self._not_own_s = {round(limit_s + BACKSTOP_S, 3) for limit_s in every} | DEFAULT_TIMEOUTS_S

    def observe(self, idle_s: float, phase_kind: PhaseKind, batch_idx: int) -> None:
        """A tick of the watchdog, from which it learns how long this rank usually makes no progress.

        Args:
            idle_s: Seconds since the rank last made progress.
            phase_kind: What it is in.
            batch_idx: Index of the batch being worked on.
        """
        if idle_s < self._idle_s:
            self._looked_at_s = self._quiet_until_s = 0.0  # both are about a standstill which is over
        self._idle_s = idle_s
        if self._limits.learned:
            self._idle_times.observe(idle_s, phase_kind, batch_idx=batch_idx, now_s=self._clock())

    def be_quiet_for(self, quiet_s: float) -> None:
        """What the rank waits for is known to take long: for so many seconds nothing is suspicious."""
        self._quiet_until_s = self._clock() + quiet_s

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is suspicious now. The hard limit applies all the same."""
        return self._clock() < self._quiet_until_s

    def is_time_to_look(self, idle_s: float, phase_kind: PhaseKind, *, joined: bool) -> bool:
        """Whether to look at what a rank does: when a limit has just been passed, and ever more rarely from then on.

        Args:
            idle_s: Seconds since the rank last made progress.
            phase_kind: What it is in.
            joined: Whether it has joined the process group.
        """
        suspect_after_s = self.suspect_after_s(phase_kind, joined=joined)
        before_s = self._looked_at_s if self._looked_at_s <= idle_s else 0.0
        passed = any(before_s < limit_s <= idle_s for limit_s in (suspect_after_s, self.limit_s(phase_kind)))
        pause_s = min(max(_LOOK_S, idle_s / 20), _RARELY_S)
        if idle_s < suspect_after_s or not (passed or idle_s - before_s >= pause_s):
            return False
        self._looked_at_s = idle_s
        return True

    def suspect_after_s(self, phase_kind: PhaseKind, *, joined: bool) -> float:
        """Seconds without progress after which a rank is first looked at; less than the phase's hard limit."""
        limit_s = self.limit_s(phase_kind)
        if self._limits.learned:
            found_s = min(self._idle_times.unusual_after_s(phase_kind), limit_s / 2)
        else:
            found_s = self._limits.suspect_after_s
            # Only a phase's own limit can be so short.
            found_s = found_s if found_s < limit_s else limit_s / 2
        return found_s if joined else max(found_s, min(START_UP_S, limit_s))

    def limit_s(self, phase_kind: PhaseKind) -> float:
        """The hard limit in such a phase, seconds."""
        return self._limits.limit_s(phase_kind.limit_name)

    def is_out(self, idle_s: float, doing: Activity, phase_kind: PhaseKind) -> bool:
        """Whether a rank has waited for its peers for as long as it may."""
        if not doing.waits_for_peers or doing.exempt:
            return False
        limit_s = self.limit_s(phase_kind)
        # A group that was created with a longer timeout of its own keeps that.
        own_s = doing.collective.timeout_ms / 1000 if doing.collective is not None else 0.0
        has_own = own_s > limit_s + BACKSTOP_S and not (self._limits.phases_s and round(own_s, 3) in self._not_own_s)
        return idle_s >= (own_s if has_own else limit_s)


def limits_words(limits: Limits) -> str:
    """When ranks are asked, and when the run is ended, in one line."""
    if limits.learned:
        least_s = min(FLOOR_S, limits.timeout_s / 2)
        asks = f"reports a wait that is unusually long for its phase ({least_s:g} s or more)"
    else:
        asks = f"reports a wait of {limits.suspect_after_s:g} s"
    own = [f"{phase} {limit_s:g} s" for phase, limit_s in limits.phases_s.items()]
    besides = f" ({', '.join(own)})" if own else ""
    return f"{asks}, {limits.on_timeout}s after {limits.timeout_s:g} s{besides}"
