"""What the parts of one rank's guard share: its place, its state, the exchange, and the log of incidents on it.

Ranks agree on the log: its entries are numbered, and each is written by whichever rank comes first.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import Incident, IncidentKind, codec
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.settings import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank of which job this is."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_port: str = ""
    master_address: str = ""

    @property
    def ranks_here(self) -> range:
        """The ranks of this host."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentEntry:
    """One entry: an incident, or the end of one.

    Attributes:
        incident: What the entry is about.
        recovered_after_s: If training makes progress again: seconds for which it made none.
        is_leaving: Whether no rank waits, but one that has finished is about to leave while others still work.
    """

    incident: Incident
    recovered_after_s: float | None = None
    is_leaving: bool = False


class IncidentLog:
    """Reads and writes the log, entry by entry.

    Args:
        not_before_ns: Entries about incidents before this wall-clock time, in nanoseconds since the epoch, are skipped:
            an earlier start of the job has left them.

    Attributes:
        number: Number of the next entry, from 0.
    """

    def __init__(self, exchange: Exchange, *, not_before_ns: int = 0) -> None:
        self._exchange = exchange
        self._not_before_ns = not_before_ns
        self.number = 0

    def read(self) -> IncidentEntry | None:
        """The next entry, if a rank has written it; None also if the exchange does not answer."""
        with suppress(ExchangeError):
            while (found := self._exchange.get_many([self._key]).get(self._key)) is not None:
                entry = codec.decode(IncidentEntry, found)
                if entry.incident.opened_ns >= self._not_before_ns:
                    return entry
                self.number += 1
        return None

    def write(self, entry: IncidentEntry) -> IncidentEntry:
        """Writes the next entry, and returns the one in the log: another rank may have been faster.

        If the exchange does not answer, the rank follows its own entry and reports alone.
        """
        try:
            return codec.decode(IncidentEntry, self._exchange.set_if_absent(self._key, codec.encode(entry)))
        except ExchangeError:
            return entry

    @property
    def _key(self) -> str:
        return f"log/{self.number}"


class Connection:
    """Connects a rank with the others: over one exchange until the process group exists, then over another.

    The main thread calls :meth:`connect`; the watchdog's thread, which may be in the middle of a round, changes at its
    next tick.

    Args:
        not_before_ns: See :class:`~lightning_ncclsafe.guard.shared.IncidentLog`.

    Attributes:
        exchange: The exchange that the watchdog's thread uses.
        log: The log of incidents on it.
        has_joined: Whether that is the exchange of the process group.
    """

    def __init__(self, exchange: Exchange, *, not_before_ns: int) -> None:
        self.exchange = exchange
        self.log = IncidentLog(exchange, not_before_ns=not_before_ns)
        self.has_joined = False
        self._next: Exchange | None = None

    @property
    def newest(self) -> Exchange:
        """The exchange that the main thread uses."""
        return self._next or self.exchange

    @property
    def is_superseded(self) -> bool:
        """Whether the watchdog's thread has yet to change: what it does on the old exchange is pointless."""
        return self._next is not None and not self.has_joined

    def connect(self, exchange: Exchange) -> None:
        """Sets the next exchange: the process group exists, and so does the job's store."""
        self._next = exchange

    def change_over(self) -> bool:
        """Changes to the new exchange if there is one, with its own log; returns whether it did."""
        if self._next is None or self.has_joined:
            return False
        self.exchange.close()
        self.exchange, self.has_joined = self._next, True
        self.log = IncidentLog(self.exchange)
        return True

    def close(self) -> None:
        """Closes both."""
        for exchange in (self.exchange, self._next):
            if exchange is not None:
                exchange.close()


class GuardState:
    """What one rank knows about the open incident, and whether its main thread has left.

    Attributes:
        began_ns: When the guard began to watch, nanoseconds since the epoch.
        open_incident: The incident that is open; None between incidents.
        verdict: The current verdict; None if there is none.
        is_off: Whether the guard has failed or is closed: it no longer asks or answers.
        answered: The ranks that took part in the last round before all ranks joined the process group.
        is_leaving: Whether this rank has finished, and is about to leave while others still work.
        leaving_is_reported: Set once that has been reported, or never will be.
        exception_is_reported: Set once this rank's exception has been reported, or never will be.
        main_thread_left: Set once the main thread has left the Trainer's function.
    """

    def __init__(self) -> None:
        self.began_ns = 0
        self.open_incident: Incident | None = None
        self.verdict: Verdict | None = None
        self.is_off = False
        self.answered: set[int] = set()
        self.is_leaving = False
        self.leaving_is_reported = threading.Event()
        self.exception_is_reported = threading.Event()
        self.main_thread_left = threading.Event()

    @property
    def ends_run(self) -> bool:
        """Whether the run cannot continue, and is being ended."""
        return self.verdict is not None and self.verdict.ends_run

    @property
    def limit_is_reported(self) -> bool:
        """Whether the current verdict is the one at the hard limit."""
        return self.verdict is not None and self.verdict.incident.kind is IncidentKind.TIMEOUT

    def error(self) -> CollectiveTimeoutError:
        """The verdict as an exception; there has to be a verdict."""
        verdict = self.verdict
        assert verdict is not None
        return CollectiveTimeoutError(verdict.answer, findings=verdict.findings, report_folder=verdict.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedRank:
    """This rank, as all parts of its guard see it.

    Attributes:
        place: Which rank of which job it is.
        limits: When to ask and when to end.
        state: The open incident and its verdict.
        connection: The exchange with the other ranks.
        probe: Collects the facts of this rank.
        ending: Refuses saves and steps once the run is being ended, and makes the process exit.
        incidents: Numbers of the incidents of this process.
        phase_kind: What kind of phase the Trainer is in, and the index of its batch; costs next to nothing.
        say: Prints one or more lines to the user.
    """

    place: Place
    limits: Limits
    state: GuardState
    connection: Connection
    probe: RankProbe
    ending: Ending
    incidents: IncidentNumbers
    phase_kind: Callable[[], tuple[PhaseKind, int]]
    say: Callable[[str], None]

    def forget_incident(self) -> None:
        """Forgets the incident and its verdict, unless this rank is being ended because of it: then that is final."""
        if not self.ending.is_closed:
            self.state.open_incident = self.state.verdict = None
