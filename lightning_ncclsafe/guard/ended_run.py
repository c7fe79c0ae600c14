"""What happens at the limit: what one rank does once the verdict is that the run cannot go on."""

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
"""Begins to save the state of the run, within a time of its own, together with the other ranks: given why the run ends,
and whether this rank has failed itself. Returns what waits until that is over."""

# What a rank that has failed is given to leave before those that are ended because of it: its callbacks may save.
_FAILED_LEAVE_S = 5.0


class EndedRun:
    """Ends the run on one rank, on whichever of its threads notices that it has to.

    The main thread raises our error in place of what broke (:meth:`leave`). If it waits and cannot, the watchdog's
    thread ends the process (:meth:`end`); at the limit it always does.

    Args:
        place: Which rank of which job this is.
        state: The verdict.
        connection: What the ranks share.
        probe: Sees the ranks of this host.
        ending: The gate that whatever saves or trains on has to pass, and how the process exits.
        write_logs: Brings what loggers were given to storage, within so many seconds, before this process has to exit.
        before_exit: What else is left to do then.
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
        """The run cannot go on. At the limit this rank ends; otherwise it first makes sure that it waits.

        That may take a while (see ``StuckDetector.reason``), and a rank that has failed waits for others to save with
        it, but not for long.
        """
        if kind is IncidentKind.TIMEOUT:
            self.end()
        elif not self._state.main_thread_left.is_set():
            self._begin_to_save(raised=False)

    def leave(self) -> None:
        """The main thread is on its way out with our error: nothing is saved. At the limit every rank leaves alike."""
        self._close()
        if self._state.limit_is_reported:
            # The watchdog's thread ends the process.
            self._ending.stay()
        hide_reported_errors()
        self._let_the_failed_leave()

    def end(self) -> None:
        """Ends this process; unless its main thread is on its way out already, and the limit is not reached."""
        state = self._state
        if self._leaves_by_itself():
            return
        if state.verdict is not None and state.verdict.incident.opened_ns < state.began_ns:
            # The ranks that waited have reported why, perhaps on other hosts; this one would end without a line.
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
        """Launchers take the first rank that ends for the cause: that has to be one that prints its own traceback."""
        raised = self._state.verdict.raised if self._state.verdict is not None else ()
        cards = [card for card in self._probe.peers if card.rank in raised]
        wait_for(
            lambda: all(self._probe.look_at_peer(card).state in ENDED for card in cards), deadline_s=_FAILED_LEAVE_S
        )

    def _may_others_come(self) -> bool:
        """Whether a rank is still on its way, and has to find that the others have given up."""
        if self._connection.has_joined:
            return False
        place = self._place
        first = place.rank - place.local_rank
        here = range(first, first + place.local_world_size)
        # On this host: ranks whose processes were found at the last search, and are there still.
        alive = {card.rank for card in self._probe.peers if self._probe.look_at_peer(card).state not in ENDED}
        missing = {*range(place.world_size)} - self._state.answered
        return any(rank in alive or rank not in here for rank in missing)

    def _end_frozen(self) -> None:
        """Every rank of a host does it: connections break with the first one, and some may leave before that."""
        frozen = self._state.verdict.frozen if self._state.verdict is not None else ()
        end_frozen((card for card in self._probe.peers if card.rank in frozen), self._say)
