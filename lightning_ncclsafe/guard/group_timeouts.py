"""The back end's timeout of every process group, set to the limit of the phase that begins."""

from collections.abc import Callable
from contextlib import suppress

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.facts import VOTE_GROUPS, Phase
from lightning_ncclsafe.facts.phase_kinds import FIRST_BATCH, is_occasional, stage_fetched
from lightning_ncclsafe.guard.thresholds import DEFAULT_TIMEOUTS_S
from lightning_ncclsafe.report.terminal import say_own_failure
from lightning_ncclsafe.settings import BACKSTOP_S, Limits

# Phases whose end no hook marks: every action may end them.
_SHORT = (FIRST_BATCH, Phase.CHECKPOINT.value)
# A user's own profiler may give every action another name.
_MOST_NAMES = 1000


class GroupTimeouts:
    """Follows the phases of one call of the Trainer, on its main thread.

    A collective keeps the timeout that its group had when it was called, whether it runs, is queued on a device or has
    not begun: gloo and NCCL copy the timeout into each ``Work`` when it is made (torch 2.13), and gloo's connections
    keep their own. So a change does not affect collectives in flight, and cannot end them early. The main thread makes
    it, between two of Lightning's actions, and so never during its own call of the back end; collectives that other
    threads have called are not affected either.

    If the Trainer changes from one phase to the next without an action, as from validation back to training, the
    timeout changes at the next action: one collective may still have the previous timeout.

    If setting a timeout fails, that is printed once, and the groups keep the strategy's.

    If no phase has its own limit, only groups without their own timeout get the strategy's, such as those of a device
    mesh, which Lightning makes with PyTorch's default.

    Args:
        limit_name: Which of the limits applies now.
    """

    def __init__(self, limits: Limits, limit_name: Callable[[], str]) -> None:
        self._limits = limits
        self._limit_name = limit_name
        self._is_on = bool(limits.phases_s)
        self._phase = ""
        self._has_set = False
        self._may_begin_phase: dict[str, bool] = {}
        # The timeout of each group when it was first seen, by its name.
        self._before_s: dict[str, float] = {}
        as_made = (limits.timeout_s, limits.limit_s(Phase.INIT.value), limits.longest_s)
        self._as_made_s = {round(timeout_s + BACKSTOP_S, 3) for timeout_s in as_made}
        self._not_chosen_s = self._as_made_s | DEFAULT_TIMEOUTS_S

    def listen(self, action_name: str) -> None:
        """Called when the innermost action changes; a listener of ``ActionTracker``."""
        name: object = action_name  # a user's profiler may use names of any type
        if isinstance(name, str) and (self._may_begin_phase.get(name, True) or self._phase in _SHORT):
            self._look(name)

    def start(self) -> None:
        """Sets the current timeouts, once process groups have been made."""
        if self._is_on or not self._limits.phases_s:
            self._safely(self._begin)

    def restore(self) -> None:
        """Restores each group's timeout; a group that was made with the limit of ``init`` gets the strategy's own."""
        if self._phase or self._has_set:
            self._safely(self._restore)

    def _look(self, name: str) -> None:
        may_begin = name.startswith(("save_checkpoint", "barrier:")) or bool(stage_fetched(name)) or is_occasional(name)
        if len(self._may_begin_phase) < _MOST_NAMES:
            self._may_begin_phase[name] = may_begin
        if self._is_on and (may_begin or self._phase in _SHORT):
            self._safely(self._follow)

    def _follow(self) -> None:
        phase = self._limit_name()
        if phase != self._phase:
            self._phase = phase
            self._set()

    def _begin(self) -> None:
        if self._is_on:
            self._phase = self._limit_name()
        self._set()

    def _set(self) -> None:
        for group in self._groups():
            wanted_s = self._wanted_s(group)
            if abs(group.timeout_s - wanted_s) > 0.0005:
                self._has_set = True
                group.set_timeout(wanted_s)

    def _wanted_s(self, group: process_groups.TimedGroup) -> float:
        before_s = self._before_s.setdefault(group.name, group.timeout_s)
        phase_s = self._limits.limit_s(self._phase) + BACKSTOP_S
        if round(before_s, 3) in self._not_chosen_s:
            return phase_s
        # If no phase has its own limit, a timeout that the user has chosen holds in all phases.
        return max(before_s, phase_s) if self._phase else before_s

    def _restore(self) -> None:
        self._phase, self._has_set = "", False
        own_s = self._limits.timeout_s + BACKSTOP_S
        for group in self._groups():
            before_s = self._before_s.get(group.name, group.timeout_s)
            group.set_timeout(own_s if round(before_s, 3) in self._as_made_s else before_s)

    def _groups(self) -> list[process_groups.TimedGroup]:
        groups = [group for group in process_groups.timed_groups() if group.description not in VOTE_GROUPS]
        names = {group.name for group in groups}
        self._before_s = {name: timeout_s for name, timeout_s in self._before_s.items() if name in names}
        return groups

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._is_on = False
            # The strategy's own timeout, rather than that of a phase that will end.
            with suppress(Exception):
                self._restore()
            say_own_failure(error, what="setting timeouts")
