"""The cause silent-rank: in a log, all ranks but a few report that they waited in vain."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    GroupView,
    Timeline,
    at_words,
    clause,
    deepest_user_frame,
    finding,
    ranks_words,
    recorded_rule,
)
from lightning_ncclsafe.rules.recorded.kit.calls import has_called_in, has_dumps, idle_behind, record_of
from lightning_ncclsafe.rules.recorded.kit.divergences import OF_TWO, conflict
from lightning_ncclsafe.rules.recorded.kit.ends import failed, failed_in_nccl
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    NO_LONGER_TIMEOUT,
    counters_evidence,
    exception_in_log,
    finished_evidence,
    log_evidence,
    one_element_evidence,
    waiting_in,
    waiting_words,
)
from lightning_ncclsafe.rules.recorded.kit.statements import LogStatements, compared, stated


@recorded_rule(
    after="network-cut",
    remedy=(
        "The rank that never complains is usually the one that the others wait for: look at what it did, in its own "
        "output and on its host. It works alone (evaluation, tokenising, a checkpoint, a logger on slow storage), "
        "waits for data, had one batch fewer, or is dead. If it was merely ended before it could log anything, read "
        "the logs of all ranks. "
    )
    + NO_LONGER_TIMEOUT,
)
def silent_rank(view: Timeline) -> Iterator[Finding]:
    """Ranks that time out name a collective; one member of that group reports nothing about it.

    Symptom:
        "Watchdog caught collective operation timeout" of all ranks but one, usually rank 0.

    Cause:
        That rank never called it, so it has nothing to time out in: it works alone, waits for data, or died.

    Remedy:
        Look at what that rank did.

    Cannot see:
        Whether it was merely ended by its launcher before its own watchdog could report.
    """
    if has_dumps(view.job) or compared(view):
        return
    if named := stated(view, StatementKind.ABSENT):
        yield _named(view, named)
        return
    if (warned := LogStatements(stated(view, StatementKind.LATE)[-1:])) and not failed(view):
        yield replace(_named(view, warned), confidence=Confidence.POSSIBLE)
        return
    for absence in _absences(view):
        # An excerpt may show only one rank.
        if len(absence.group.oldest) > 1 or view.job.is_sized or view.job.log.works_on:
            yield _finding(view, absence)
            return
    if not any(group.seq is not None for group in view.groups):
        waits = stated(view, StatementKind.STORE_WAIT)
        yield from _at_store(view, waits) if waits else _by_exceptions(view)
        yield from _at_barrier(view)
    elif view.job.is_sized and 0 < len(view.job.silent) < len(view.waiting) and not failed(view):
        yield _of_other_groups(view)


def _named(view: Timeline, named: LogStatements) -> Finding:
    """The ranks that a tool reports after it has compared all."""
    ranks = named.ranks
    return finding(
        view,
        ranks,
        f"{clause(ranks, 'has|have')} not arrived: {named[0].detail}.",
        evidence=named.evidence,
    )


def _at_store(view: Timeline, waits: LogStatements) -> Iterator[Finding]:
    """A rank waited for a key that another one must set in the store; no line names that one."""
    if failed(view) or stated(view, StatementKind.NOT_JOINED):
        return
    detail = f" {waits[0].detail}" if waits[0].detail else ""
    at_store = f"{waits.by_words} waited in vain{detail} at the store for what another process must put there"
    yield finding(
        view,
        (),
        f"{at_store}; the log does not say which{_meanwhile(view)}.",
        confidence=Confidence.LIKELY if view.job.log.works_on else Confidence.POSSIBLE,
        evidence=(*waits.evidence, *_works_on(view)),
    )


def _at_barrier(view: Timeline) -> Iterator[Finding]:
    """The rank that checks a monitored barrier did not answer: it is late itself, or waits for another."""
    came = stated(view, StatementKind.BARRIER_WAIT)
    ranks = tuple(rank for rank in came.ranks if rank not in came.by)
    if not ranks or failed(view) or any(record_of(one).awaited for one in view.facts.values()):
        return
    if any(rank in view.facts and view.facts[rank].exception is not None for rank in ranks):
        return
    text = (
        f"{ranks_words(came.by)} reached a monitored barrier, and {ranks_words(ranks)} did not answer there: that one "
        "is late, or has waited for another one, which its own log would name"
    )
    yield finding(view, ranks, f"{text}.", confidence=Confidence.POSSIBLE, evidence=came.evidence)


def _meanwhile(view: Timeline) -> str:
    return ", while another process was still at work" if view.job.log.works_on else ""


def _works_on(view: Timeline) -> Iterator[Evidence]:
    if view.job.log.works_on:
        yield Evidence(source="log", text=f"Still at work when others had given up: {view.job.log.works_on}")


def _of_other_groups(view: Timeline) -> Finding:
    """A log does not give members: the awaited rank may be in several of the groups that wait."""
    ranks = view.job.silent
    groups = [group for group in view.groups if group.seq is not None]
    waiting = {rank: call for group in groups for rank, call in waiting_in(view, group).items()}
    alone = len(ranks) == 1 and len(waiting) == view.job.world_size - 1 and conflict(view) is None
    return finding(
        view,
        ranks,
        f"{clause(ranks, 'reports|report')} nothing, while {waiting_words(waiting)}.",
        confidence=Confidence.LIKELY if alone else Confidence.POSSIBLE,
        evidence=(
            *(item for group in groups[:4] for item in counters_evidence(view, group)),
            *log_evidence(view, [*waiting][:2]),
        ),
    )


def _by_exceptions(view: Timeline) -> Iterator[Finding]:
    """Gloo's ranks raise when they have waited in vain: the ranks that raised nothing are the awaited ones."""
    own = failed_in_nccl(view)
    gave_up = tuple(rank for rank in view.waiting if view.facts[rank].exception is not None and rank not in own)
    silent = tuple(
        rank
        for rank in range(view.job.world_size)
        if rank not in view.facts or (view.facts[rank].exception is None and rank not in view.waiting)
    )
    if not gave_up or not silent or failed(view) or stated(view, StatementKind.UNREACHABLE):
        return
    stack = view.facts[gave_up[0]].raised_stack
    frame = deepest_user_frame(stack)
    calls = stack[-1].function if stack else ""
    where = f" in {calls}{at_words(frame)}"
    text = f"{clause(silent, 'reports|report nothing, while')} {ranks_words(gave_up)} gave up waiting{where}"
    yield finding(
        view,
        silent,
        f"{text}.",
        confidence=Confidence.LIKELY if len(silent) == 1 and len(gave_up) > 1 else Confidence.POSSIBLE,
        evidence=tuple(
            exception_in_log(found, rank) for rank in gave_up[:4] if (found := view.facts[rank].exception) is not None
        ),
    )


class _Absence(NamedTuple):
    """A group in which ranks wait, and the members that report nothing about it, ascending."""

    group: GroupView
    ranks: tuple[int, ...]


def _absences(view: Timeline) -> Iterator[_Absence]:
    """Groups that wait and have members that report nothing, if no reporting member is the one they wait for."""
    if failed(view):
        return
    for group in view.groups:
        if group.seq is None or idle_behind(view, group):
            continue
        ranks = tuple(rank for rank in group.members if not has_called_in(view, rank, group.name))
        if ranks:
            yield _Absence(group, ranks)


def _finding(view: Timeline, absence: _Absence) -> Finding:
    ranks, group = absence.ranks, absence.group
    waiting = waiting_in(view, group)
    of_two = any(call.op in OF_TWO for call in waiting.values())
    # Two ranks may be an excerpt if the size of the job is unknown.
    is_known = view.job.is_sized or set(ranks) <= set(view.job.log.spoke) or len(waiting) > 2
    # If more ranks are silent than wait, they are hardly all late: a log that is cut lacks their lines.
    is_excerpt = view.job.log.is_cut and len(ranks) > len(waiting) and not view.job.is_sized
    if (is_excerpt and not set(ranks) <= set(view.job.log.spoke)) or (
        len(waiting) == 1 and len(ranks) > 1 and not is_known
    ):
        ranks = ()
    alone = len(ranks) == 1 and len(waiting) > 1 and is_known and conflict(view) is None and not of_two
    number = f" of number {group.seq:,}" if group.seq else ""
    text = f"{clause(ranks, 'reports|report nothing')}{number}, while {waiting_words(waiting)}"
    if not ranks:
        text = f"{waiting_words(waiting)}, and the log does not say for whom"
    if view.job.log.is_cut:
        text += "; the log ends before what others may have reported next"
    return finding(
        view,
        ranks,
        f"{text}{_meanwhile(view)}.",
        confidence=Confidence.LIKELY if alone and not view.job.log.is_cut else Confidence.POSSIBLE,
        evidence=(
            *_works_on(view),
            *finished_evidence(view, ranks),
            *counters_evidence(view, group),
            *one_element_evidence(waiting.values()),
            *log_evidence(view, [*waiting][:2]),
        ),
    )
