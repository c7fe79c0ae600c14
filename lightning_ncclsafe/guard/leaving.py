"""How a rank leaves its call of the Trainer: with an exception, at the end, or because the run is ended."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeGuard

from lightning_ncclsafe._torch import process_groups, stores
from lightning_ncclsafe.code.libraries import TRAINER_STAGE
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.errors import (
    CollectiveTimeoutError,
    DatasetMismatchError,
    HostPreflightError,
    PlannedStopError,
)
from lightning_ncclsafe.exchange import Exchange, ExchangeError, poll_interval_s, wait_for, wait_for_keys
from lightning_ncclsafe.facts import Phase
from lightning_ncclsafe.guard.after_verdict import AfterVerdict
from lightning_ncclsafe.guard.ending import say_goodbye, wait_for_others
from lightning_ncclsafe.guard.gathering import report_deadline_s, share_last_facts
from lightning_ncclsafe.guard.shared import GuardedRank
from lightning_ncclsafe.probes.process import stacks

# How long beyond suspect_after a finished rank waits for the others, while none of them reports a wait.
LINGER_S = 5.0
# How long the end of an incident may take to reach every rank once training has finished.
_SETTLE_S = 1.0
# For ranks that wait for the last one to finish; these polls are cheap.
_FINISH_POLL_S, _FINISH_POLLS_PER_S = 0.01, 5000.0


class Leaving:
    """What one rank does on its main thread when the Trainer's function has raised or returned."""

    def __init__(self, own: GuardedRank, after_verdict: AfterVerdict, wake_watchdog: Callable[[], None]) -> None:
        self._own = own
        self._after_verdict = after_verdict
        self._wake_watchdog = wake_watchdog

    @marked(Mark.STORE)
    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """The Trainer's function raised: informs the other ranks and waits for the report before this rank leaves.

        Returns:
            The error to raise instead, if this one only reports a broken collective and the cause is known. At the
            limit, it does not return: the process exits.
        """
        state = self._own.state
        is_ours = self._own.ending.is_closed or isinstance(error, CollectiveTimeoutError)
        is_consequence = is_ours or process_groups.is_communication_error(error)
        if self._leaves_at_the_end(error):
            self.finish()
            return None
        if isinstance(error, KeyboardInterrupt):  # as most ranks are
            self.share_last_facts(error)
        has_nobody_to_ask = state.is_off or self._own.place.world_size == 1 or is_orderly(error)
        if not has_nobody_to_ask and not self._is_explained(is_consequence):
            self._own.probe.exception = stacks.exception_facts(error, is_consequence=is_consequence)
            state.main_thread_left.set()
            self._wake_watchdog()
            _wait_undisturbed(state.exception_is_reported, 2 * report_deadline_s(self._own.place.world_size))
        state.main_thread_left.set()
        if not _is_success(error) and not isinstance(error, KeyboardInterrupt):
            self._after_verdict.save(raised=not is_consequence and not is_orderly(error))
        if not self._is_explained(is_consequence):
            if _is_success(error):
                self._leave_with_success(error)
            return None
        self._after_verdict.leave()
        self._own.ending.exit_after_main_thread()
        return state.error()

    @marked(Mark.STORE)
    def finish(self) -> None:
        """The Trainer's function returned: waits until it has returned on all ranks, and answers them meanwhile.

        A rank that left would take its facts with it, and rank 0 the job's store, while others still need them.

        Raises:
            CollectiveTimeoutError: If the others wait for this rank in vain.
        """
        self._own.probe.finished = True
        self._own.state.main_thread_left.set()
        rank, world_size = self._own.place.rank, self._own.place.world_size
        if world_size == 1:
            return
        exchange, began = self._own.connection.newest, time.monotonic()
        with suppress(ExchangeError):
            stay_until_all_finished(
                exchange,
                rank=rank,
                world_size=world_size,
                may_leave=lambda: self._may_leave(time.monotonic() - began),
                leave_behind=self._ask_who_stays,
            )
            self._settle()
            say_goodbye(exchange, rank)
            if stores.hosts_store(rank) and not self._own.state.ends_run:
                wait_for_others(exchange, rank, world_size)
        if self._own.state.ends_run:
            self._after_verdict.leave()
            raise self._own.state.error()

    def _leaves_at_the_end(self, error: BaseException) -> bool:
        """Whether the rank exits with success after its loops: then no rank waits for it."""
        if self._own.state.is_off or self._own.phase_kind()[0].phase is Phase.INIT or not _is_success(error):
            return False
        stack = stacks.exception_facts(error, is_consequence=False).stack
        return not TRAINER_STAGE.has_any(stack)

    def _leave_with_success(self, error: SystemExit) -> None:
        """Leaves after the loops with success, if it is known that no rank still trains."""
        verdict = self._own.state.verdict
        if verdict is not None and not verdict.is_joint:
            # The launcher would take this rank's status for the status of the run.
            error.code = 1
        elif verdict is not None and not verdict.ends_run:
            self.finish()

    def share_last_facts(self, error: BaseException) -> None:
        """Publishes this rank's facts, for whoever asks later, without asking the others."""
        exception = stacks.exception_facts(error, is_consequence=False)
        with suppress(ExchangeError):
            share_last_facts(self._own.connection.newest, replace(self._own.probe.snapshot(0.0), exception=exception))

    def _is_explained(self, is_consequence: bool) -> bool:
        """Whether the cause is already reported, and the exception only a consequence of it."""
        return is_consequence and self._own.state.ends_run

    def _may_leave(self, waited_s: float) -> bool:
        # Others may still work alone, and then this rank may leave; it stays longer if a rank waits for it.
        limits = self._own.limits
        stay_s = limits.suspect_after_s if self._own.state.open_incident is None else limits.longest_s
        return waited_s > stay_s + LINGER_S or self._cannot_ask()

    def _cannot_ask(self) -> bool:
        return self._own.state.ends_run or self._own.state.is_off or bool(self._own.connection.exchange.lost)

    def _ask_who_stays(self) -> None:
        """Has all ranks asked before this one leaves: later, without it and perhaps without the store, none can ask."""
        if self._own.state.open_incident is None and not self._cannot_ask():
            self._own.state.is_leaving = True
            self._wake_watchdog()
            self._own.state.leaving_is_reported.wait(report_deadline_s(self._own.place.world_size))

    def _settle(self) -> None:
        """Waits a moment for an open incident to be closed, so that its end is still printed."""

        def is_settled() -> bool:
            if self._own.state.open_incident is None:
                return True
            self._wake_watchdog()
            return False

        wait_for(is_settled, deadline_s=_SETTLE_S, give_up=lambda: self._may_leave(0))


@marked(Mark.STORE)
def stay_until_all_finished(
    exchange: Exchange, *, rank: int, world_size: int, may_leave: Callable[[], bool], leave_behind: Callable[[], None]
) -> None:
    """Waits until all ranks have finished, or this one may leave without them.

    Rank 0 counts and announces it, so that not every rank asks the store for every rank.

    Args:
        may_leave: Whether this rank has waited for long enough.
        leave_behind: Called before it leaves without others.
    """
    exchange.set(f"finished/{rank}", b"")
    keys = ["finished/all"] if rank else [f"finished/{other}" for other in range(world_size)]
    poll_s = poll_interval_s(world_size, least_s=_FINISH_POLL_S, polls_per_s=_FINISH_POLLS_PER_S)
    # Most often the last rank is milliseconds behind.
    finished = wait_for_keys(
        exchange, keys, deadline_s=math.inf, poll_s=poll_s / 10, longest_poll_s=poll_s, give_up=may_leave
    )
    if len(finished) < len(keys):
        leave_behind()
    if rank == 0:
        exchange.set("finished/all", b"")


@marked(Mark.STORE)
def _wait_undisturbed(event: threading.Event, timeout_s: float) -> None:
    """Waits for an event. What the handler of a signal raises meanwhile is dropped: this rank leaves with an exception.

    torch's handler raises once a worker has been killed, often just after the exception that this has caused.
    """
    ends_s = time.monotonic() + timeout_s
    while not event.is_set() and (left_s := ends_s - time.monotonic()) > 0:
        with suppress(Exception):
            event.wait(left_s)


def _is_success(error: BaseException) -> TypeGuard[SystemExit]:
    """Whether it would end the process with status 0; not if all ranks stop on SIGTERM."""
    return isinstance(error, SystemExit) and not error.code and not is_orderly(error)


def is_orderly(error: BaseException) -> bool:
    """Whether an exception is the guard's, Lightning's or the user's way to stop on all ranks."""
    orderly = (KeyboardInterrupt, CollectiveTimeoutError, DatasetMismatchError, HostPreflightError, PlannedStopError)
    return isinstance(error, orderly) or type(error).__name__ in ("SIGTERMException", "_TunerExitException")
