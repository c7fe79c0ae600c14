"""What a rank without this package has left behind: a Flight Recorder's dump, lines in a log."""

from dataclasses import dataclass, field
from enum import Enum

SET_UP = "the set-up of the NCCL communicator"
"""Where a rank waits for another one's part of a new communicator."""

LOST_AT_SET_UP = f"{SET_UP}, until the store was lost"
"""The same, if the connection to the store broke meanwhile."""


class StatementKind(str, Enum):
    """What a line of a log states explicitly."""

    ENDED = "ended"
    """A process has ended, according to its launcher."""
    PEER_LOST = "peer-lost"
    """The other end of a connection was closed."""
    UNREACHABLE = "unreachable"
    """A connection could not be made, or its other end has stopped answering."""
    ABSENT = "absent"
    """Ranks have not reached a collective, according to a comparison of all ranks."""
    AHEAD = "ahead"
    """Ranks have called a different number of collectives than most."""
    NOT_JOINED = "not-joined"
    """Not all ranks have joined the store while the process group was created."""
    STORE_WAIT = "store-wait"
    """A rank has waited in vain for a key that another one must put into the store."""
    BARRIER_WAIT = "barrier-wait"
    """A rank has reached a monitored barrier, and the rank that counts the others has not answered."""
    OTHER_SIZES = "other-sizes"
    """Ranks have called one operation with different sizes or types, according to a comparison of all ranks."""
    OTHER_MODEL = "other-model"
    """A rank has read a different number of parameters from another rank; NCCL does not check what is read."""
    OTHER_OPERATIONS = "other-operations"
    """The same for different operations."""
    LATE = "late"
    """Ranks have not called yet what others wait in, according to a warning: they may still call it."""
    APART = "apart"
    """Ranks wait for each other in different operations, according to a warning: they may still arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a log states about ranks, or about processes whose rank it does not give.

    Attributes:
        kind: What it states.
        ranks: The ranks that it is about, ascending; empty if it does not name them.
        by: The rank that wrote it; None if unknown.
        detail: The rest of it in words, from the log.
        exit_code: The exit code of a process; minus the signal's number if a signal ended it.
        local_rank: Number of the process among those of its host.
        count: How many ranks have arrived, or are compared.
        of: How many should arrive.
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
    """What logs contain beyond single ranks.

    Attributes:
        statements: Their explicit statements.
        works_on: A progress bar that continued after ranks had timed out; empty if there is none.
        is_cut: Whether a log ends just after its last rank began to write.
        spoke: Ranks that wrote about the failure, but nothing about themselves, ascending.
        lost_store: Ranks that could no longer reach the store, which rank 0 or the launcher keeps, ascending.
        finished: Why ``Trainer.fit`` has stopped regularly, as only rank 0 reports: ``"max_epochs=2 reached"``; empty
            if it has not.
    """

    statements: tuple[Statement, ...] = ()
    works_on: str = ""
    is_cut: bool = False
    spoke: tuple[int, ...] = ()
    lost_store: tuple[int, ...] = ()
    finished: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts:
    """What was read about one rank.

    Attributes:
        has_dump: Whether a Flight Recorder's dump of the rank was read.
        is_idle: Whether the dump shows nothing outstanding in any group.
        is_empty: Whether the dump is empty because the recorder was off.
        is_blank: Whether the recorder was on and the rank had called nothing.
        is_moving: Whether a collective had just completed on the device when the dump was written.
        has_lost: Whether the ring buffer has lost entries that are outstanding.
        is_doubtful: Whether the dump may be of an earlier run, or the host's clock wrong: all its calls were long
            before those of the others.
        has_log: Whether lines of the rank were read in a log.
        group_known: Whether the log has the process group of its collectives, as torch writes it since 2.3.
        waited_ms: How long a collective had run when NCCL's watchdog abandoned it, milliseconds; 0 if none was.
        awaited: Ranks that this one has waited for in vain, according to its log, ascending.
        awaited_in: Where it waited: ``"monitored_barrier"``, `SET_UP`, `LOST_AT_SET_UP`.
        exit_code: Its exit code, according to its launcher; minus the signal's number if a signal ended it.
        ended_first: Whether it failed first, according to its launcher.
        survived: An exception that did not end it, as it called a collective afterwards in which others wait, too:
            ``"ValueError: bad label 11 at train.py:42 in training_step"``; empty if there is none.
        stuck_s: Seconds for which the watchdog's thread made no progress (PyTorch's heartbeat monitor); 0 if it did.
        lines: Its most important lines in the log, each cut to 300 characters.
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
