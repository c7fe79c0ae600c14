"""What a rank has left behind where nothing of this package ran: a Flight Recorder's dump, lines in a log."""

from dataclasses import dataclass, field
from enum import Enum


class StatementKind(str, Enum):
    """What a line of a log says in so many words."""

    ENDED = "ended"
    """A process has ended, by the word of whoever started it."""
    PEER_LOST = "peer-lost"
    """The other end of a connection was closed."""
    UNREACHABLE = "unreachable"
    """A connection could not be made, or its other end has stopped answering."""
    ABSENT = "absent"
    """Ranks have not come to a collective, by the word of whoever has compared all."""
    AHEAD = "ahead"
    """Ranks have called another number of collectives than most."""
    NOT_JOINED = "not-joined"
    """Not all ranks have come to the store while the process group was made."""
    STORE_WAIT = "store-wait"
    """A rank has waited in vain for what another one must put into the store."""
    BARRIER_WAIT = "barrier-wait"
    """A rank has come to a monitored barrier, where the one that counts the others has not answered."""
    OTHER_SIZES = "other-sizes"
    """Ranks have called one operation with other sizes or types, by the word of whoever has compared them."""
    OTHER_OPERATIONS = "other-operations"
    """The same of different operations."""
    LATE = "late"
    """Ranks have not called yet what others wait in, by a warning: they may still."""
    APART = "apart"
    """Ranks wait in different operations for each other, by a warning: they may still come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a log says of ranks, or of processes of which it does not give the rank.

    Attributes:
        kind: What it says.
        ranks: The ranks that it is about, ascending; empty where it does not name them.
        by: The rank that says it; None where that is not known.
        detail: The rest of it in words, from the log.
        exit_code: With what a process ended; minus the signal's number where a signal ended it.
        local_rank: Number of the process among those of its host.
        count: How many ranks have come.
        of: How many were to come.
        line: The line, cut to 300 characters.
    """

    kind: StatementKind
    ranks: tuple[int, ...] = field(default=(), metadata={"ranges": True})
    by: int | None = None
    detail: str = ""
    exit_code: int | None = None
    local_rank: int | None = None
    count: int = 0
    of: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """What logs say beyond single ranks.

    Attributes:
        statements: What they say in so many words.
        works_on: A progress bar that went on while ranks had timed out; empty where there is none.
        is_cut: Whether a log ends where the last rank of which it tells had only just begun to speak.
        spoke: Ranks that say something of the failure, and nothing of themselves, ascending.
    """

    statements: tuple[Statement, ...] = ()
    works_on: str = ""
    is_cut: bool = False
    spoke: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts:
    """What was read of one rank.

    Attributes:
        has_dump: Whether a Flight Recorder's dump of the rank was read.
        is_idle: Whether that says that nothing was outstanding, in any group.
        is_empty: Whether it says nothing at all: the recorder was off.
        is_blank: Whether the recorder was on, and the rank had called nothing at all.
        is_moving: Whether something had just ended on the device when it was written.
        has_lost: Whether the ring no longer has all that is outstanding.
        is_doubtful: Whether the dump may be of an earlier run, or the clock of the host wrong: all its calls were long
            before those of the others.
        has_log: Whether lines of the rank were read in a log.
        group_known: Whether the log says to which process group its collectives belong; torch says so since 2.3.
        waited_ms: How long a collective had run when NCCL's watchdog gave it up, milliseconds; 0 where none was.
        awaited: Ranks for which this one says that it has waited in vain, ascending.
        awaited_in: Where it did: ``"monitored_barrier"``, ``"the set-up of the NCCL communicator"``.
        exit_code: With what its process ended, by its launcher; minus the signal's number where a signal ended it.
        ended_first: Whether its launcher says that it was the first to fail.
        survived: What it raised before it called a collective in which others wait, too, so that it did not end it:
            ``"ValueError: bad label 11 at train.py:42 in training_step"``; empty where it raised nothing of the kind.
        stuck_s: Seconds for which the watchdog's own thread did not move (PyTorch's heartbeat monitor); 0 if it did.
        lines: Its most telling lines, as they stand in the log, each cut to 300 characters.
    """

    has_dump: bool = False
    is_idle: bool = False
    is_empty: bool = False
    is_blank: bool = False
    is_moving: bool = False
    has_lost: bool = False
    is_doubtful: bool = False
    has_log: bool = False
    group_known: bool = True
    waited_ms: int = 0
    awaited: tuple[int, ...] = ()
    awaited_in: str = ""
    exit_code: int | None = None
    ended_first: bool = False
    survived: str = ""
    stuck_s: int = 0
    lines: tuple[str, ...] = ()
