"""Ranks of which a log says that they ended by themselves: whoever waited for them is explained."""

import re

from lightning_ncclsafe.rules.kit import Timeline

# An abort (-6) is what the watchdog does to whoever waits, and SIGTERM (-15) what a launcher does to all others.
FATAL = {
    -9: "killed by SIGKILL (by the kernel's out-of-memory killer, or by somebody else)",
    -11: "ended by a segmentation fault (SIGSEGV)",
    -7: "ended by a bus error (SIGBUS, as where /dev/shm is full)",
    -4: "ended by an illegal instruction (SIGILL)",
    -8: "ended by an arithmetic error (SIGFPE)",
}
_FROM_SHELL = {128 - code: code for code in FATAL}
# More than there are bytes in any GPU: a length that was read of something else than a length.
_ABSURD = re.compile(r"[Tt]ried to allocate more than 1EB")


def fatal_exit(view: Timeline, rank: int) -> int:
    """The signal that ended this rank, negative; 0 where it was none that explains anything."""
    record = view.facts[rank].record
    code = record.exit_code if record is not None and record.exit_code is not None else 0
    return code if code in FATAL else _FROM_SHELL.get(code, 0)


def died(view: Timeline) -> tuple[int, ...]:
    """Ranks whose process was ended from outside or by a fault, ascending; not by a launcher that ends the others."""
    records = {rank: facts.record for rank, facts in sorted(view.facts.items()) if facts.record is not None}
    first = {view.facts[rank].host for rank, record in records.items() if record.ended_first}
    return tuple(
        rank
        for rank, record in records.items()
        if fatal_exit(view, rank) and (record.ended_first or view.facts[rank].host not in first)
    )


def raised(view: Timeline) -> tuple[int, ...]:
    """Ranks with an exception of their own, those aside that only a mismatched collective can have brought about."""
    return tuple(rank for rank in view.raised if not _ABSURD.search(_message(view, rank)))


def misled(view: Timeline) -> tuple[int, ...]:
    """Ranks that wanted more memory than there is in the world: they took other data for a length."""
    return tuple(rank for rank in view.raised if _ABSURD.search(_message(view, rank)))


def _message(view: Timeline, rank: int) -> str:
    exception = view.facts[rank].exception
    return exception.message if exception is not None else ""


def gone(view: Timeline) -> tuple[int, ...]:
    """Ranks that ended by themselves, for whatever reason, ascending."""
    return tuple(sorted({*died(view), *raised(view)}))
