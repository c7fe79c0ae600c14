"""What rules ask of recordings: who has ended by itself, what logs say in so many words, who is absent."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import Collective, ExceptionFacts, JobFacts, RankFacts, Statement, StatementKind
from lightning_ncclsafe.rules.kit import Evidence, GroupView, Timeline, has_given_up

# An abort (-6) is what the watchdog does to whoever waits, and SIGTERM (-15) what a launcher does to all others.
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
# More than there are bytes in any GPU: a length that was read of something else than a length.
_ABSURD = re.compile(r"[Tt]ried to allocate more than 1EB")


def fatal(code: int | None) -> int:
    """The signal in an exit code, negative, also where a shell has made it a number above 128; 0 where it is none that
    explains anything."""
    return code if code in FATAL else _FROM_SHELL.get(code or 0, 0)


def is_error(code: int | None) -> bool:
    """Whether a process has ended by itself with this exit code, and not well."""
    return code is not None and (0 < code <= _LAST_CODE or code > _LAST_CODE + _SIGNALS)


def fatal_exit(view: Timeline, rank: int) -> int:
    """The signal that ended this rank, negative; 0 where it was none that explains anything."""
    record = view.facts[rank].record
    return fatal(record.exit_code) if record is not None else 0


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
    """Ranks with an exception of their own, those aside that only a mismatched collective can have brought about.

    A line with the name of an exception, without a traceback, does not explain a signal that a launcher reports.
    """
    return tuple(rank for rank in view.raised if not _ABSURD.search(_message(view, rank)) and not _is_line(view, rank))


def _is_line(view: Timeline, rank: int) -> bool:
    exception = view.facts[rank].exception
    return exception is not None and not exception.stack and fatal_exit(view, rank) != 0


def misled(view: Timeline) -> tuple[int, ...]:
    """Ranks that wanted more memory than there is in the world: they took other data for a length."""
    return tuple(rank for rank in view.raised if _ABSURD.search(_message(view, rank)))


def _message(view: Timeline, rank: int) -> str:
    exception = view.facts[rank].exception
    return exception.message if exception is not None else ""


def failed_in_nccl(view: Timeline) -> tuple[int, ...]:
    """Ranks with an error of NCCL's own that says nothing of a peer: it may be theirs, or follow from a peer's end."""
    return tuple(rank for rank in view.facts if is_of_nccl(view.facts[rank].exception))


def is_of_nccl(exception: ExceptionFacts | None) -> bool:
    """Whether NCCL itself has failed, by an exception that says nothing of a peer."""
    if exception is None or not exception.is_consequence:
        return False
    return _OF_NCCL.search(exception.message) is not None and not _OF_PEERS.search(exception.message)


def gone(view: Timeline) -> tuple[int, ...]:
    """Ranks that ended by themselves, for whatever reason, ascending."""
    return tuple(sorted({*died(view), *raised(view)}))


_QUOTED = 4


def stated(job: JobFacts, *kinds: StatementKind) -> tuple[Statement, ...]:
    """The statements of these kinds, in the order of the log."""
    return tuple(one for one in job.log.statements if one.kind in kinds)


def compared(job: JobFacts) -> tuple[Statement, ...]:
    """Those by which ranks have called what cannot complete together."""
    return stated(job, StatementKind.OTHER_SIZES, StatementKind.OTHER_OPERATIONS)


def said_of_all(statements: tuple[Statement, ...]) -> tuple[int, ...]:
    """The ranks that these are about, ascending."""
    return tuple(sorted({rank for one in statements for rank in one.ranks}))


def lines_of(statements: tuple[Statement, ...]) -> tuple[Evidence, ...]:
    """The lines that say so."""
    return tuple(Evidence(source="log", rank=one.by, text=one.line) for one in statements if one.line)[:_QUOTED]


def details_of(statements: tuple[Statement, ...]) -> Iterator[str]:
    """What they say, each once."""
    yield from dict.fromkeys(one.detail for one in statements if one.detail)


def anybody_gave_up(view: Timeline) -> bool:
    """Whether a rank's own limit was over: what others lost after that, they lost because of it."""
    return any(
        (facts.record is not None and facts.record.waited_ms) or has_given_up(facts) for facts in view.facts.values()
    )


class Absence(NamedTuple):
    """A group in which ranks wait, and the members that say nothing of it, ascending."""

    group: GroupView
    ranks: tuple[int, ...]


def absences(view: Timeline) -> Iterator[Absence]:
    """Groups that wait, of which some members say nothing, and none of the others is what they wait for."""
    if gone(view):
        return
    for group in view.groups:
        if group.seq is None or idle_behind(view, group):
            continue
        ranks = tuple(rank for rank in group.members if not tells_of(view, rank, group.name))
        if ranks:
            yield Absence(group, ranks)


def tells_of(view: Timeline, rank: int, group: str) -> bool:
    """Whether anything is known of what this rank has called in a group."""
    facts = view.facts.get(rank)
    return facts is not None and any(own.name == group for own in facts.groups)


def idle_behind(view: Timeline, group: GroupView) -> tuple[int, ...]:
    """Members that are known not to have called what others wait in, and that wait for nothing themselves."""
    return tuple(
        rank
        for rank in group.behind
        if tells_of(view, rank, group.name) and not view.waits(rank) and not any(pending_p2p(view.facts[rank]))
    )


def pending_p2p(facts: RankFacts) -> Iterator[Collective]:
    """Sends and receives that have not completed, the oldest first."""
    yield from (call for call in facts.collectives if call.is_p2p and not call.completed)
