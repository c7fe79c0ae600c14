"""How ranks ended, according to their exceptions, and to exit codes that launchers report."""

import re

from lightning_ncclsafe.facts import ExceptionFacts
from lightning_ncclsafe.facts.recorded import LOST_AT_SET_UP, SET_UP
from lightning_ncclsafe.rules.kit import Timeline, has_given_up, message_of
from lightning_ncclsafe.rules.recorded.kit.calls import record_of

AT_INIT = (SET_UP, LOST_AT_SET_UP)
"""Where a rank waits while the first communicator is set up."""

# The watchdog aborts ranks that wait (-6), and a launcher sends SIGTERM to all others (-15).
FATAL = {
    -9: "killed by SIGKILL (by the kernel's out-of-memory killer or someone else)",
    -11: "ended by a segmentation fault (SIGSEGV)",
    -7: "ended by a bus error (SIGBUS, as where /dev/shm is full)",
    -4: "ended by an illegal instruction (SIGILL)",
    -8: "ended by an arithmetic error (SIGFPE)",
}
_LAST_CODE, _SIGNALS = 128, 64
_FROM_SHELL = {_LAST_CODE - code: code for code in FATAL}
_OF_NCCL = re.compile(r"NCCL [Ee]rror|nccl\w+ failed")
_OF_PEERS = re.compile(r"[Rr]emote|[Cc]onnection|peer|abort|time|exited|ncclUniqueId")
# More than any GPU has: other data was taken for a length.
_ABSURD = re.compile(r"[Tt]ried to allocate more than 1EB")


def fatal_signal(code: int | None) -> int:
    """The fatal signal in an exit code, negative, also in a shell's code above 128; 0 if there is none."""
    return code if code in FATAL else _FROM_SHELL.get(code or 0, 0)


def is_error(code: int | None) -> bool:
    """Whether a process that ended with this exit code failed by itself."""
    return code is not None and (0 < code <= _LAST_CODE or code > _LAST_CODE + _SIGNALS)


def fatal_signal_of(view: Timeline, rank: int) -> int:
    """The fatal signal that ended this rank, negative; 0 if there was none."""
    return fatal_signal(record_of(view.facts[rank]).exit_code)


def died(view: Timeline) -> tuple[int, ...]:
    """Ranks whose process ended by a fault or from outside, not by a launcher after another failure; ascending.

    A rank whose own watchdog had given up before had waited for others: its end follows from that.
    """
    records = {rank: record_of(facts) for rank, facts in sorted(view.facts.items())}
    first = {view.facts[rank].host for rank, record in records.items() if record.ended_first}
    return tuple(
        rank
        for rank, record in records.items()
        if fatal_signal_of(view, rank)
        and not record.waited_ms
        and (record.ended_first or view.facts[rank].host not in first)
    )


def raised(view: Timeline) -> tuple[int, ...]:
    """Ranks with an exception of their own, except those that only a mismatched collective can cause.

    A line with the name of an exception, without a traceback, does not explain a signal that a launcher reports.
    """
    others = {*misled(view)}
    return tuple(rank for rank in view.raised if rank not in others and not _is_line(view, rank))


def _is_line(view: Timeline, rank: int) -> bool:
    exception = view.facts[rank].exception
    return exception is not None and not exception.stack and fatal_signal_of(view, rank) != 0


def misled(view: Timeline) -> tuple[int, ...]:
    """Ranks that tried to allocate an impossible amount of memory: they took other data for a length."""
    return tuple(rank for rank in view.raised if _ABSURD.search(message_of(view.facts[rank])))


def failed_in_nccl(view: Timeline) -> tuple[int, ...]:
    """Ranks with an error of NCCL's that names no peer: it may be their own, or follow from a peer's end."""
    return tuple(rank for rank in view.facts if _is_of_nccl(view.facts[rank].exception))


def _is_of_nccl(exception: ExceptionFacts | None) -> bool:
    """Whether NCCL itself has failed, according to an exception that names no peer."""
    if exception is None or not exception.is_consequence:
        return False
    return _OF_NCCL.search(exception.message) is not None and not _OF_PEERS.search(exception.message)


def failed(view: Timeline) -> tuple[int, ...]:
    """Ranks that ended by themselves, for whatever reason, ascending."""
    return tuple(sorted({*died(view), *raised(view)}))


def a_timeout_expired(view: Timeline) -> bool:
    """Whether a rank's own timeout had expired: connections lost after that are consequences."""
    return any(record_of(facts).waited_ms or has_given_up(facts) for facts in view.facts.values())


def lost_at_init(view: Timeline) -> bool:
    """Whether a rank lost the store while it waited for the set-up of a communicator."""
    return any(record_of(facts).awaited_in == LOST_AT_SET_UP for facts in view.facts.values())
