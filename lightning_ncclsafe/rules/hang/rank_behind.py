"""The cause rank-behind: the others wait for a rank, and no more specific cause fits."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_ncclsafe.facts import ChildProcess, RankFacts
from lightning_ncclsafe.facts.wording import capitalised, duration_words, group_words
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Findings,
    Kind,
    Timeline,
    blocked_at_one_line,
    clause,
    finding,
    handling_exception,
    hang_rule,
    held_remedy,
    is_unenforced,
    joined,
    location_of,
    others_wait,
    own_timeouts,
    polling_remedy,
    positions,
    ranks_by,
    ranks_words,
    straggler_finding,
    verb,
    where_words,
)
from lightning_ncclsafe.rules.kit.machine import Wait, wait_of

_REMEDY = (
    "Look at why this line takes longer here than on the other ranks: its input (a larger sample, another branch), its "
    "host (load, memory, a slower device), a lock or a download."
)
_REMEDY_FINISHED = (
    "Look at what these ranks skipped or the others do in addition: a stage, an epoch, a save or a collective after "
    "the last batch, under a condition that does not hold on all ranks."
)
_REMEDY_ALONE = (
    "{who} not wait in a collective: check whether the thread, program or service that should answer is still alive, "
    "and read its last output. Wait with a timeout."
)
_REMEDY_PROCESS = (
    "Look at what process {pid} is doing (its output; py-spy dump --pid {pid}, if it runs Python), and wait for it "
    "with a timeout."
)
_REMEDY_FULL = (
    "The pipe is full, and process {pid}, which has its other end, does not read it: look at what that process is "
    "doing. Read all pipes of a process at once (communicate(), a thread for each), or let output go to a file."
)
_PLACES = 4
_REMEDY_UNKNOWN = "Compare the ranks' stacks below: the one that differs is the one to look at."


def is_named_otherwise(finding: Finding, others: Findings) -> bool:
    """Whether another cause names these ranks, or explains why no rank stands out."""
    # Why ranks gave up waiting does not show which rank they waited for.
    better = [other for _, other in others.every if other.rule not in ("rank-behind", "timeout-misuse")]
    if not better:
        return False
    # It has said of all other ranks that they have finished.
    if any({*other.ranks}.isdisjoint(finding.ranks) for other in others.likely(("unfinished-rank",))):
        return True
    covered = {rank for other in better for rank in other.ranks}
    return not finding.ranks or covered.issuperset(finding.ranks) or finding.confidence is Confidence.POSSIBLE


@hang_rule(after="host-starved", superseded=is_named_otherwise)
def rank_behind(view: Timeline) -> Iterator[Finding]:
    """A rank has not reached the collective in which the others wait, for no known cause; or each waits by itself.

    Symptom:
        All ranks but a few wait in a collective; or none does, and each waits by itself: for a thread, a
        program, a file, a service.

    Cause:
        None of the known causes: the rank's line, hook and batch show where to look.

    Remedy:
        Find out why this line takes longer on this rank.

    Cannot see:
        Why the line is slow.
    """
    is_awaited = bool(view.waiting) or all(facts.inspection is None for facts in view.facts.values())
    if view.stragglers and is_awaited:
        # One finding per place: another rank's more specific cause would otherwise hide this rank.
        for ranks in _by_place(view):
            yield _finding(view, ranks)
    elif view.behind:
        yield _finding(view, view.behind)
    elif fewer := _with_fewer_calls(view):
        yield _finding(view, fewer)
    elif view.waiting and not any(facts.inspection and facts.inspection.moved for facts in view.facts.values()):
        yield _nobody_stands_out(view)
    elif view.each_waits_alone and is_awaited:
        yield _each_by_itself(view)


def _with_fewer_calls(view: Timeline) -> tuple[int, ...]:
    """Ranks whose devices do not answer, and which by their own count have not called what others wait in."""
    awaited = {group.name: group.seq or 0 for group in view.groups}
    return tuple(
        rank
        for rank, facts in sorted(view.facts.items())
        if any(0 <= group.calls < awaited.get(group.name, 0) for group in facts.unrecorded)
    )


def _each_by_itself(view: Timeline) -> Finding:
    """No rank is in a collective, and none works; whether the others wait for one of them is unknown."""
    ranks = tuple(sorted(view.facts))
    waits = clause(ranks, "waits|wait by itself|themselves")
    text = f"{waits}, {where_words(view, ranks[0])}: no rank is in a collective."
    return finding(view, ranks, text, confidence=Confidence.POSSIBLE, remedy=_remedy_alone(view, ranks))


def _by_place(view: Timeline) -> list[tuple[int, ...]]:
    """The stragglers grouped by place; beyond a few places, the rest as one group."""
    shared = blocked_at_one_line(view)
    doing = {rank: view.activities[rank] for rank in view.stragglers}
    places = {rank: ("" if rank in shared else one.hook, location_of(one.place)) for rank, one in doing.items()}
    listed = sorted(ranks_by(places).values())
    rest = tuple(sorted(rank for ranks in listed[_PLACES - 1 :] for rank in ranks))
    return [*listed[: _PLACES - 1], *([rest] if rest else [])]


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    is_over = view.activities[ranks[0]].kind is Kind.FINISHED
    waits_alone = all(view.activities[rank].waits_alone or view.facts[rank].awaited_processes for rank in ranks)
    # The recorder shows that the others wait for them; a rank that waits as well may wait for one of these.
    is_certain = bool(view.behind) and set(ranks) <= set(view.stragglers)
    found = straggler_finding(
        view,
        ranks,
        "will not come" if is_over else "is|are behind",
        confidence=Confidence.LIKELY if is_certain else Confidence.POSSIBLE,
        remedy=_REMEDY_FINISHED if is_over else _remedy(view, ranks, wait_alone=waits_alone),
    )
    sentences = (found.summary, _gives_up_words(view, view.waiting), _awaited_process_sentence(view, ranks))
    return replace(found, summary=joined(sentences))


def _remedy(view: Timeline, ranks: tuple[int, ...], *, wait_alone: bool) -> str:
    if held := [*handling_exception(view, ranks).values()]:
        return held_remedy(held[0])
    if polled := polling_remedy(view.facts[ranks[0]].stack):
        return polled
    return _remedy_alone(view, ranks) if wait_alone else _REMEDY


def _remedy_alone(view: Timeline, ranks: tuple[int, ...]) -> str:
    awaited = [one[0] for rank in ranks if (one := view.facts[rank].awaited_processes)]
    if len(ranks) == len(awaited) == 1 and awaited[0].state != "zombie":
        remedy = _REMEDY_FULL if _writes_to_pipe(view.facts[ranks[0]]) else _REMEDY_PROCESS
        return remedy.format(pid=awaited[0].pid)
    return _REMEDY_ALONE.format(who=verb(ranks, "This rank does", "These ranks do"))


def _nobody_stands_out(view: Timeline) -> Finding:
    """All ranks wait and no rank stands out: those furthest behind are the best guess."""
    places = positions(view)
    least = min(places.values())
    behind = tuple(rank for rank, place in places.items() if place == least)
    ranks = behind if len(behind) < len(places) else ()
    who = f"; {clause(ranks, 'is|are furthest behind')}, {where_words(view, ranks[0])}" if ranks else ""
    text = f"{others_wait(view)}, and no rank was found that keeps them waiting{who}."
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.POSSIBLE,
        evidence=(Evidence(source="stack", text=f"Every rank that answered waits: {ranks_words(view.waiting)}."),),
        remedy=_REMEDY_UNKNOWN,
    )


def _gives_up_words(view: Timeline, ranks: Iterable[int]) -> str:
    """``"Group '1', in which ranks 0-1 wait, gives up after 3 s."``; empty if none of these waits in such a group.

    Empty, too, if it has not given up after far longer.
    """
    own = own_timeouts(view)
    pending = {rank: own[rank] for rank in sorted(ranks) if rank in own and not is_unenforced(view, rank)}
    if len({*pending.values()}) != 1:
        return ""
    name, timeout_ms = next(iter(pending.values()))
    waits = clause(tuple(pending), "waits|wait")
    return f"{capitalised(group_words(name))}, in which {waits}, gives up after {duration_words(timeout_ms / 1000)}."


def _awaited_process_sentence(view: Timeline, ranks: Iterable[int]) -> str:
    """``"Rank 1 reads from its child process 123 (sh -c), which is sleeping."``; empty if no rank waits for one."""
    facts = (view.facts[rank] for rank in [*ranks][:LISTED] if rank in view.facts)
    parts = [_awaits_words(one, one.awaited_processes[0]) for one in facts if one.awaited_processes]
    return f"{capitalised('; '.join(parts))}." if parts else ""


def _writes_to_pipe(facts: RankFacts) -> bool:
    """Whether a rank's main thread waits until somebody reads what it has written to a pipe."""
    return "write" in _pipe_channel(facts)


def _pipe_channel(facts: RankFacts) -> str:
    thread = facts.machine.main_thread
    return thread.wait_channel if thread is not None and wait_of(thread.wait_channel) is Wait.PIPE else ""


def _awaits_words(facts: RankFacts, child: ChildProcess) -> str:
    waits = "writes to" if _writes_to_pipe(facts) else "reads from" if "read" in _pipe_channel(facts) else "waits for"
    command = f" ({child.command})" if child.command else ""
    state = ", which has ended" if child.state == "zombie" else f", which is {child.state}" if child.state else ""
    return f"rank {facts.rank} {waits} its child process {child.pid}{command}{state}"
