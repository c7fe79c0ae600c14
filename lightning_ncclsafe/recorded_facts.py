"""What a rank has left behind where nothing of this package ran: a Flight Recorder's dump, lines in a log."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts:
    """What was read of one rank.

    Attributes:
        has_dump: Whether a Flight Recorder's dump of the rank was read.
        is_idle: Whether that says that nothing was outstanding, in any group.
        is_empty: Whether it says nothing at all: the recorder was off, or nothing was ever called.
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
