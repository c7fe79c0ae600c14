"""How long a rank may make no progress before it is looked at, as learned from the run, and before the run is ended."""

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_ncclsafe.facts import Phase
from lightning_ncclsafe.facts.phase_kinds import BATCHES_TO_KNOW, UNKNOWN_S, PhaseKind
from lightning_ncclsafe.rules.kit.activity import Activity
from lightning_ncclsafe.settings import BACKSTOP_S, Limits

# Once a loop's batches are known. Users wait longer before they look; a garbage collection, a slow file or a busy host
# takes less.
FLOOR_S = 10.0
# In phases that take long even in a healthy run: whether what others wait for goes on by itself can be asked early.
EARLY_S = 20.0
# How much longer than usual is unusual. Step times differ by less than a factor of two; a rank that has to wait for
# another's garbage collection, evaluation of one batch or retry of a download stays below this factor.
MULTIPLE = 4.0
# Shorter ones do not matter: a multiple of them is below the floor.
_LEAST_S = 1.0
# Kept of each kind of phase, 4 KB; with a step of two seconds that is a quarter of an hour.
_KEPT = 512
# The usual length is the third-longest of those: the 99.4th percentile once all are there, and from the first on
# nothing that happened once or twice.
_RANK = 3
# One incident may come in pieces. What is longer than usual counts only once in a while: so the pieces count as one,
# while what happens again and again becomes usual.
_UNUSUAL_EVERY_S = 60.0


@dataclass
class _Kind:
    """What is known of one kind of phase; 28 kinds at most."""

    lengths_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    usual_s: float = 0.0
    batches: int = 0
    last_batch: int = -1
    unusual_at_s: float = float("-inf")

    def add(self, length_s: float) -> None:
        self.lengths_s.append(length_s)
        longest = heapq.nlargest(_RANK, self.lengths_s)
        self.usual_s = longest[-1] if len(longest) == _RANK else 0.0


class IdleTimes:
    """Learns how long one rank makes no progress in each kind of phase. Belongs to the watchdog's thread.

    It observes every tick of the watchdog, and idle times shorter than a tick only by chance; they do not matter here.
    """

    def __init__(self) -> None:
        self._kinds: dict[PhaseKind, _Kind] = {}
        self._before: tuple[float, PhaseKind] | None = None

    def observe(self, idle_s: float, phase_kind: PhaseKind, *, batch_idx: int, now_s: float) -> None:
        """Learns from a tick of the watchdog."""
        before, self._before = self._before, (idle_s, phase_kind)
        if before is not None and idle_s < before[0]:
            self._learn(*before, now_s)
        kind = self._kinds.setdefault(phase_kind, _Kind())
        if batch_idx != kind.last_batch:
            # Several may have passed since the last tick; fewer than none where a loop has begun again.
            kind.batches += max(batch_idx - kind.last_batch, 1) if kind.last_batch >= 0 else 0
            kind.last_batch = batch_idx

    def unusual_after_s(self, phase_kind: PhaseKind) -> float:
        """From how many seconds on a stall is unusual in such a phase."""
        kind = self._kinds.get(phase_kind, _Kind())
        least_s = EARLY_S if phase_kind.is_long else UNKNOWN_S
        if phase_kind.per_batch and not phase_kind.is_long:
            least_s = FLOOR_S if kind.batches >= BATCHES_TO_KNOW else UNKNOWN_S
        return max(least_s, MULTIPLE * kind.usual_s)

    def _learn(self, length_s: float, phase_kind: PhaseKind, now_s: float) -> None:
        if length_s < _LEAST_S:
            return
        kind = self._kinds[phase_kind]
        if length_s >= self.unusual_after_s(phase_kind):
            if now_s - kind.unusual_at_s < _UNUSUAL_EVERY_S:
                return
            kind.unusual_at_s = now_s
        kind.add(length_s)


# What processes are given to start before the first meeting, however soon the user wants to know.
START_UP_S = 30.0
# How often a rank that makes no progress, but waits for no other, is looked at again: a look takes some 30 ms.
_LOOK_S = 1.0
_RARELY_S = 10.0
# Timeouts of process groups that are created without one: PyTorch's for NCCL, and for all other back ends.
DEFAULT_TIMEOUTS_S = frozenset({600.0, 1800.0})


class Thresholds:
    """Decides when to look and when to end, for one rank. Belongs to the watchdog's thread.

    Attributes:
        phase_kind: What kind of phase the Trainer was in at the last tick: all limits are those of such a phase.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase_kind = PhaseKind(phase=Phase.INIT)
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
        """Learns, at each tick of the watchdog, how long this rank usually makes no progress."""
        if idle_s < self._idle_s:
            self._looked_at_s = self._quiet_until_s = 0.0  # both are about a stall which is over
        self._idle_s, self.phase_kind = idle_s, phase_kind
        if self._limits.learned:
            self._idle_times.observe(idle_s, phase_kind, batch_idx=batch_idx, now_s=self._clock())

    def be_quiet_for(self, quiet_s: float) -> None:
        """Treats nothing as suspicious for this many seconds: what the rank waits for is known to take long."""
        self._quiet_until_s = self._clock() + quiet_s

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is suspicious now. The hard limit applies all the same."""
        return self._clock() < self._quiet_until_s

    def is_time_to_look(self, idle_s: float, *, joined: bool) -> bool:
        """Whether to look at what a rank does: when a limit has just been passed, and ever more rarely from then on."""
        suspect_after_s = self.suspect_after_s(joined=joined)
        before_s = self._looked_at_s if self._looked_at_s <= idle_s else 0.0
        passed = any(before_s < limit_s <= idle_s for limit_s in (suspect_after_s, self.limit_s))
        pause_s = min(max(_LOOK_S, idle_s / 20), _RARELY_S)
        if idle_s < suspect_after_s or not (passed or idle_s - before_s >= pause_s):
            return False
        self._looked_at_s = idle_s
        return True

    def suspect_after_s(self, *, joined: bool) -> float:
        """Seconds without progress after which a rank is first looked at; less than the phase's hard limit."""
        limit_s = self.limit_s
        if self._limits.learned:
            found_s = min(self._idle_times.unusual_after_s(self.phase_kind), limit_s / 2)
        else:
            found_s = self._limits.suspect_after_s
            # Only a phase's own limit can be so short.
            found_s = found_s if found_s < limit_s else limit_s / 2
        return found_s if joined else max(found_s, min(START_UP_S, limit_s))

    @property
    def limit_s(self) -> float:
        """The hard limit, seconds."""
        return self._limits.limit_s(self.phase_kind.limit_name)

    def is_past_limit(self, idle_s: float, doing: Activity) -> bool:
        """Whether a rank has waited for its peers for as long as it may."""
        if not doing.waits_for_peers or doing.exempt:
            return False
        # A group that was created with its own, longer timeout keeps it.
        own_s = doing.collective.timeout_ms / 1000 if doing.collective is not None else 0.0
        is_longer = own_s > self.limit_s + BACKSTOP_S
        has_own = is_longer and not (self._limits.phases_s and round(own_s, 3) in self._not_own_s)
        return idle_s >= (own_s if has_own else self.limit_s)


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
