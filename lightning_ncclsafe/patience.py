"""How long a rank may stand still before it is looked at, and before the run is ended."""

from lightning_ncclsafe.rules.activity import Activity
from lightning_ncclsafe.settings import BACKSTOP_S, Limits

# What processes are given to start before the first meeting, however soon the user wants to know.
START_UP_S = 30.0
# How often a rank that stands still, but waits for nobody, is looked at again: a look takes some 30 ms.
_LOOK_S = 1.0
_RARELY_S = 10.0


class Patience:
    """Says when to look and when to end, for one rank.

    Args:
        limits: What the user has set.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._looked_at_s = 0.0

    def is_time_to_look(self, idle_s: float, *, joined: bool) -> bool:
        """Whether to look at what a rank does: when a limit has just been passed, and ever more rarely from then on.

        Args:
            idle_s: Seconds since the rank last made progress.
            joined: Whether it has joined the process group.
        """
        suspect_after_s = self.suspect_after_s(joined=joined)
        before_s = self._looked_at_s if self._looked_at_s <= idle_s else 0.0
        passed = any(before_s < limit_s <= idle_s for limit_s in (suspect_after_s, self._limits.timeout_s))
        pause_s = min(max(_LOOK_S, idle_s / 20), _RARELY_S)
        if idle_s < suspect_after_s or not (passed or idle_s - before_s >= pause_s):
            return False
        self._looked_at_s = idle_s
        return True

    def suspect_after_s(self, *, joined: bool) -> float:
        """Seconds without progress after which a rank is first looked at."""
        if joined:
            return self._limits.suspect_after_s
        return max(self._limits.suspect_after_s, min(START_UP_S, self._limits.timeout_s))

    def is_out(self, idle_s: float, doing: Activity) -> bool:
        """Whether a rank has waited for its peers for as long as it may."""
        if not doing.waits_for_peers or doing.exempt:
            return False
        # A group that was created with a longer timeout of its own keeps that.
        own_s = doing.collective.timeout_ms / 1000 if doing.collective is not None else 0.0
        return idle_s >= (own_s if own_s > self._limits.timeout_s + BACKSTOP_S else self._limits.timeout_s)
