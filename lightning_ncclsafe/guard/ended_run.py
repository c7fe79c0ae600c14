"""What one rank does once the verdict is that the run cannot go on."""

from collections.abc import Callable

from lightning_ncclsafe.exchange import wait_for
from lightning_ncclsafe.facts import IncidentKind
from lightning_ncclsafe.guard.ending import Ending, end_frozen, end_run
from lightning_ncclsafe.guard.local_ranks import Place
from lightning_ncclsafe.guard.reporter import hide_reported_errors
from lightning_ncclsafe.guard.shared import Connection, GuardState
from lightning_ncclsafe.probes.host.resources import ENDED
from lightning_ncclsafe.probes.rank import RankProbe

Save = Callable[[str, bool], Callable[[], None]]
"""Begins to save the state of the run, together with the other ranks and within its own time limit. Takes why the run
ends, and whether this rank itself has failed; returns a function that waits until the save is over."""

# How long a failed rank has to leave before the ranks that are ended because of it: its callbacks may save.
_FAILED_LEAVE_S = 5.0


class EndedRun:
    """Ends the run on one rank, on whichever thread notices that the run has to end.

    The main thread raises our error in place of the broken collective's (:meth:`leave`). If it waits and cannot raise,
    the watchdog's thread ends the process (:meth:`end`); at the limit, it always does.

    Args:
        place: Which rank of which job this is.
        state: The verdict.
        connection: What the ranks share.
        probe: Looks at the ranks of this host.
        ending: Refuses saves and steps from then on, and makes the process exit.
        write_logs: Writes what loggers were given to storage, within so many seconds, before this process exits.
        before_exit: Called last before this process exits.
        save: Saves the state of the run before any rank leaves.
        say: Prints one or more lines to the user.
    """

    def __init__(
        self,
        *,
        place: Place,
        state: GuardState,
        connection: Connection,
        probe: RankProbe,
        ending: Ending,
        write_logs: Callable[[float], None],
        before_exit: Callable[[], None],
        save: Save,
        say: Callable[[str], None],
    ) -> None:
        self._place = place
        self._state = state
        self._connection = connection
        self._probe = probe
        self._ending = ending
        self._write_logs = write_logs
        self._before_exit = before_exit
        self._save = save
        self._say = say

    def verdict_is_there(self, kind: IncidentKind) -> None:
        """Acts on the verdict that the run cannot go on: ends this rank at the limit; otherwise begins to save.

        Before its end, this rank makes sure that it waits (see ``StuckDetector.reason``), which may take a while. A
        rank that has failed waits for others to save with it, but not for long.
        """
        if kind is IncidentKind.TIMEOUT:
            self.end()
        elif not self._state.main_thread_left.is_set():
            self._begin_to_save(raised=False)

    def leave(self) -> None:
        """The main thread leaves with our error, and nothing is saved. At the limit, all ranks exit in the same way."""
        self._close()
        if self._state.limit_is_reported:
            # The watchdog's thread ends the process.
            self._ending.stay()
        hide_reported_errors()
        self._let_the_failed_leave()

    def end(self) -> None:
        """Ends this process, unless its main thread already leaves and the limit is not reached."""
        state = self._state
        if self._leaves_by_itself():
            return
        if state.verdict is not None and state.verdict.incident.opened_ns < state.began_ns:
            # The ranks that waited have reported why, perhaps on other hosts; this one would end without a message.
            self._say(f"rank {self._place.rank} started too late; the other ranks gave up: {state.verdict.answer}")
        self._close()
        self.save(raised=False)
        self._let_the_failed_leave()
        # As the failed rank leaves, the collective in which the main thread waits may break.
        if self._leaves_by_itself():
            return
        end_run(
            ending=self._ending,
            make_error=state.error,
            exchange=self._connection.exchange,
            rank=self._place.rank,
            world_size=self._place.world_size,
            write_logs=self._write_logs,
            logging_ranks=state.verdict.logging_ranks if state.verdict is not None else (),
            end_frozen=self._end_frozen,
            before_exit=self._before_exit,
            may_others_come=self._may_others_come,
        )

    def save(self, *, raised: bool) -> None:
        """Saves the state of the run, or waits until that is done.

        Args:
            raised: Whether this rank has failed itself.
        """
        self._begin_to_save(raised)()

    def _begin_to_save(self, raised: bool) -> Callable[[], None]:
        return self._save(self._state.verdict.answer if self._state.verdict is not None else "", raised)

    def _close(self) -> None:
        self._state.is_ending = True
        self._ending.close(self._state.error)

    def _leaves_by_itself(self) -> bool:
        return self._state.main_thread_left.is_set() and not self._state.limit_is_reported

    def _let_the_failed_leave(self) -> None:
        """Waits for failed ranks to exit first: launchers blame the first one, and it should print its traceback."""
        raised = self._state.verdict.raised if self._state.verdict is not None else ()
        peers = [peer for peer in self._probe.peers if peer.rank in raised]
        wait_for(
            lambda: all(self._probe.look_at_peer(peer).state in ENDED for peer in peers), deadline_s=_FAILED_LEAVE_S
        )

    def _may_others_come(self) -> bool:
        """Whether a rank is still starting, and has to find that the others have given up."""
        if self._connection.has_joined:
            return False
        place = self._place
        first = place.rank - place.local_rank
        here = range(first, first + place.local_world_size)
        # On this host: ranks whose processes were found at the last search, and still exist.
        alive = {peer.rank for peer in self._probe.peers if self._probe.look_at_peer(peer).state not in ENDED}
        missing = {*range(place.world_size)} - self._state.answered
        return any(rank in alive or rank not in here for rank in missing)

    def _end_frozen(self) -> None:
        """Kills the frozen ranks of this host. Every rank does it: some may leave before, as connections break."""
        frozen = self._state.verdict.frozen if self._state.verdict is not None else ()
        end_frozen((peer for peer in self._probe.peers if peer.rank in frozen), self._say)
