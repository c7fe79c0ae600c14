"""What one rank does once the verdict is that the run cannot continue."""

from collections.abc import Callable

from lightning_ncclsafe.exchange import wait_for
from lightning_ncclsafe.facts import ENDED, IncidentKind
from lightning_ncclsafe.guard.ending import end_frozen, end_run
from lightning_ncclsafe.guard.reporter import hide_reported_errors
from lightning_ncclsafe.guard.shared import GuardedRank

Save = Callable[[str, bool], Callable[[], None]]
"""Begins to save the state of the run, together with the other ranks and within its own time limit. Takes why the run
ends, and whether this rank itself has failed; returns a function that waits until the save is over."""

# How long a failed rank has to leave before the ranks that are ended because of it: its callbacks may save, and a
# process takes seconds to exit on a busy host.
_FAILED_LEAVE_S = 10.0


class AfterVerdict:
    """Ends the run on one rank, on whichever thread notices that the run has to end.

    The main thread raises our error in place of the broken collective's (:meth:`leave`). If it waits and cannot raise,
    the watchdog's thread ends the process (:meth:`end`); at the limit, it always does.
    """

    def __init__(
        self, own: GuardedRank, *, write_logs: Callable[[float], None], before_exit: Callable[[], None], save: Save
    ) -> None:
        self._own = own
        self._write_logs = write_logs
        self._before_exit = before_exit
        self._save = save

    def follow_verdict(self, kind: IncidentKind) -> None:
        """Acts on the verdict that the run cannot continue: ends this rank at the limit; otherwise begins to save.

        Before its end, this rank makes sure that it waits (see ``StuckDetector.reason``), which may take a while. A
        rank that has failed waits for others to save with it, but not for long.
        """
        if kind is IncidentKind.TIMEOUT:
            self.end()
        elif not self._own.state.main_thread_left.is_set():
            self._begin_to_save(raised=False)

    def leave(self) -> None:
        """The main thread leaves with our error, and nothing is saved. At the limit, all ranks exit in the same way."""
        self._close()
        if self._own.state.limit_is_reported:
            # The watchdog's thread ends the process.
            self._own.ending.stay()
        hide_reported_errors()
        self._let_the_failed_leave()

    def end(self) -> None:
        """Ends this process, unless its main thread already leaves and the limit is not reached."""
        if self._leaves_by_itself():
            return
        own, verdict = self._own, self._own.state.verdict
        if verdict is not None and verdict.incident.opened_ns < own.state.began_ns:
            # The ranks that waited have reported why, perhaps on other hosts; this one would end without a message.
            own.say(f"rank {own.place.rank} started too late; the other ranks gave up: {verdict.answer}")
        self._close()
        self.save(raised=False)
        self._let_the_failed_leave()
        # When the failed rank leaves, the collective in which the main thread waits may break.
        if self._leaves_by_itself():
            return
        end_run(
            ending=own.ending,
            exchange=own.connection.exchange,
            rank=own.place.rank,
            world_size=own.place.world_size,
            write_logs=self._write_logs,
            logging_ranks=verdict.logging_ranks if verdict is not None else (),
            end_frozen=self._end_frozen,
            before_exit=self._before_exit,
            may_others_come=self._may_others_come,
        )

    def save(self, *, raised: bool) -> None:
        """Saves the state of the run, or waits until that is done; ``raised``: whether this rank itself has failed."""
        self._begin_to_save(raised)()

    def _begin_to_save(self, raised: bool) -> Callable[[], None]:
        return self._save(self._own.state.verdict.answer if self._own.state.verdict is not None else "", raised)

    def _close(self) -> None:
        self._own.ending.close(self._own.state.error)

    def _leaves_by_itself(self) -> bool:
        return self._own.state.main_thread_left.is_set() and not self._own.state.limit_is_reported

    def _let_the_failed_leave(self) -> None:
        """Waits for failed ranks to exit first: launchers blame the first one, and it should print its traceback."""
        raised = self._own.state.verdict.raised if self._own.state.verdict is not None else ()
        peers = [peer for peer in self._own.probe.peers.known if peer.rank in raised]
        wait_for(
            lambda: all(self._own.probe.peers.look_at(peer).state in ENDED for peer in peers),
            deadline_s=_FAILED_LEAVE_S,
        )

    def _may_others_come(self) -> bool:
        """Whether a rank is still starting, and has to learn that the others have given up."""
        if self._own.connection.has_joined:
            return False
        here = self._own.place.ranks_here
        # On this host: ranks whose processes were found at the last search, and still exist.
        alive = {
            peer.rank for peer in self._own.probe.peers.known if self._own.probe.peers.look_at(peer).state not in ENDED
        }
        missing = {*range(self._own.place.world_size)} - self._own.state.answered
        return any(rank in alive or rank not in here for rank in missing)

    def _end_frozen(self) -> None:
        """Kills the frozen ranks of this host. Every rank does it: some may leave before, as connections break."""
        frozen = self._own.state.verdict.frozen if self._own.state.verdict is not None else ()
        end_frozen((peer for peer in self._own.probe.peers.known if peer.rank in frozen), self._own.say)
