"""Questions of rules about recordings: which ranks ended by themselves, explicit statements in logs, absent ranks."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import Collective, ExceptionFacts, JobFacts, RankFacts, Statement, StatementKind
from lightning_ncclsafe.rules.kit import Evidence, GroupView, Timeline, has_given_up

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


def fatal(code: int | None) -> int:
    """The fatal signal in an exit code, negative, also in a shell's code above 128; 0 if there is none."""
    return code if code in FATAL else _FROM_SHELL.get(code or 0, 0)


def is_error(code: int | None) -> bool:
    """Whether a process that ended with this exit code failed by itself."""
    return code is not None and (0 < code <= _LAST_CODE or code > _LAST_CODE + _SIGNALS)


def fatal_exit(view: Timeline, rank: int) -> int:
    """The fatal signal that ended this rank, negative; 0 if there was none."""
    record = view.facts[rank].record
    return fatal(record.exit_code) if record is not None else 0


def died(view: Timeline) -> tuple[int, ...]:
    """Ranks whose process ended by a fault or from outside, not by a launcher after another failure; ascending."""
    records = {rank: facts.record for rank, facts in sorted(view.facts.items()) if facts.record is not None}
    first = {view.facts[rank].host for rank, record in records.items() if record.ended_first}
    return tuple(
        rank
        for rank, record in records.items()
        if fatal_exit(view, rank) and (record.ended_first or view.facts[rank].host not in first)
    )


def raised(view: Timeline) -> tuple[int, ...]:
    """Ranks with an exception of their own, except those that only a mismatched collective can cause.

    A line with the name of an exception, without a traceback, does not explain a signal that a launcher reports.
    """
    return tuple(rank for rank in view.raised if not _ABSURD.search(_message(view, rank)) and not _is_line(view, rank))


def _is_line(view: Timeline, rank: int) -> bool:
    exception = view.facts[rank].exception
    return exception is not None and not exception.stack and fatal_exit(view, rank) != 0


def misled(view: Timeline) -> tuple[int, ...]:
    """Ranks that tried to allocate an impossible amount of memory: they took other data for a length."""
    return tuple(rank for rank in view.raised if _ABSURD.search(_message(view, rank)))


def _message(view: Timeline, rank: int) -> str:
    exception = view.facts[rank].exception
    return exception.message if exception is not None else ""


def failed_in_nccl(view: Timeline) -> tuple[int, ...]:
    """Ranks with an error of NCCL's that names no peer: it may be their own, or follow from a peer's end."""
    return tuple(rank for rank in view.facts if is_of_nccl(view.facts[rank].exception))


def is_of_nccl(exception: ExceptionFacts | None) -> bool:
    """Whether NCCL itself has failed, according to an exception that names no peer."""
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
    """The statements that ranks have called what cannot complete together."""
    return stated(job, StatementKind.OTHER_SIZES, StatementKind.OTHER_OPERATIONS)


def said_of_all(statements: tuple[Statement, ...]) -> tuple[int, ...]:
    """The ranks in these statements, ascending."""
    return tuple(sorted({rank for one in statements for rank in one.ranks}))


def lines_of(statements: tuple[Statement, ...]) -> tuple[Evidence, ...]:
    """The lines of these statements."""
    return tuple(Evidence(source="log", rank=one.by, text=one.line) for one in statements if one.line)[:_QUOTED]


def details_of(statements: tuple[Statement, ...]) -> Iterator[str]:
    """The details of these statements, each once."""
    yield from dict.fromkeys(one.detail for one in statements if one.detail)


def anybody_gave_up(view: Timeline) -> bool:
    """Whether a rank's own timeout had expired: connections lost after that are consequences."""
    return any(
        (facts.record is not None and facts.record.waited_ms) or has_given_up(facts) for facts in view.facts.values()
    )


class Absence(NamedTuple):
    """A group in which ranks wait, and the members that report nothing about it, ascending."""

    group: GroupView
    ranks: tuple[int, ...]


def absences(view: Timeline) -> Iterator[Absence]:
    """Groups that wait and have members that report nothing, if no reporting member is the one they wait for."""
    if gone(view):
        return
    for group in view.groups:
        if group.seq is None or idle_behind(view, group):
            continue
        ranks = tuple(rank for rank in group.members if not tells_of(view, rank, group.name))
        if ranks:
            yield Absence(group, ranks)


def tells_of(view: Timeline, rank: int, group: str) -> bool:
    """Whether any call of this rank in a group is known."""
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
