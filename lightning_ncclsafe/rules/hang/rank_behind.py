"""The cause rank-behind: the others wait for a rank, and no better-known cause fits."""

from collections import defaultdict
from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Findings,
    Kind,
    Timeline,
    clause,
    finding,
    hang_rule,
    held_at_one_line,
    held_up,
    location_of,
    others_wait,
    positions,
    ranks_words,
    standing,
)

_REMEDY = (
    "Look at why this line takes longer here than on the other ranks: its input (a larger sample, another branch), its "
    "host (load, memory, a slower device), a lock or a download."
)
_REMEDY_FINISHED = (
    "Look at what these ranks skipped or the others do in addition: a stage, an epoch, a save or a collective after "
    "the last batch, under a condition that does not hold on all ranks."
)
_REMEDY_ALONE = (
    "These ranks do not wait in a collective: check whether the thread, program or service that should answer is still "
    "alive, and read its last output. Wait with a timeout."
)
_PLACES = 4
_REMEDY_UNKNOWN = "Compare the ranks' stacks below: the one that differs is the one to look at."


def is_named_otherwise(finding: Finding, others: Findings) -> bool:
    """That a rank is behind is no news once a cause names this rank, or explains why nobody stands out."""
    # Why ranks gave up waiting does not tell for whom they waited.
    better = [other for _, other in others.every if other.rule not in ("rank-behind", "timeout-misuse")]
    if not better:
        return False
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
        # Another rank may have a better-known cause of its own, and this one would be hidden behind it.
        for ranks in _by_place(view):
            yield _finding(view, ranks)
    elif view.behind:
        yield _finding(view, view.behind)
    elif view.waiting and not any(facts.inspection and facts.inspection.moved for facts in view.facts.values()):
        yield _nobody_stands_out(view)
    elif view.each_waits_alone and is_awaited:
        yield _each_by_itself(view)


def _each_by_itself(view: Timeline) -> Finding:
    """No rank is in a collective, and none works; whether one of them is awaited by the others, nothing tells."""
    ranks = tuple(sorted(view.facts))
    text = f"{clause(ranks, 'waits|wait')} by themselves, {standing(view, ranks[0])}: no rank is in a collective."
    return finding(view, ranks, text, confidence=Confidence.POSSIBLE, remedy=_REMEDY_ALONE)


def _by_place(view: Timeline) -> list[tuple[int, ...]]:
    """Those that stand at one place together; of many places, the last ones together as well."""
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    shared = held_at_one_line(view)
    for rank in view.stragglers:
        doing = view.activities[rank]
        alike["" if rank in shared else doing.hook, location_of(doing.place)].append(rank)
    listed = sorted(map(tuple, alike.values()))
    rest = tuple(sorted(rank for ranks in listed[_PLACES - 1 :] for rank in ranks))
    return [*listed[: _PLACES - 1], *([rest] if rest else [])]


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    is_over = view.activities[ranks[0]].kind is Kind.FINISHED
    waits_alone = all(view.activities[rank].waits_alone for rank in ranks)
    # The recorder has it that the others wait for them; who waits as well may do so for one of these.
    is_certain = bool(view.behind) and set(ranks) <= set(view.stragglers)
    return held_up(
        view,
        ranks,
        "will not come" if is_over else "is|are behind",
        confidence=Confidence.LIKELY if is_certain else Confidence.POSSIBLE,
        remedy=_REMEDY_FINISHED if is_over else (_REMEDY_ALONE if waits_alone else _REMEDY),
    )


def _nobody_stands_out(view: Timeline) -> Finding:
    """Everyone waits and the facts name nobody: the ranks that are furthest behind are the best guess."""
    places = positions(view)
    least = min(places.values())
    behind = tuple(rank for rank, place in places.items() if place == least)
    ranks = behind if len(behind) < len(places) else ()
    who = f"; {clause(ranks, 'is|are furthest behind')}, " if ranks else ""
    who += standing(view, ranks[0]) if ranks else ""
    text = f"{others_wait(view, ())}, and no rank was found that keeps them waiting{who}."
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.POSSIBLE,
        evidence=(Evidence(source="stack", text=f"Every rank that answered waits: {ranks_words(view.waiting)}."),),
        remedy=_REMEDY_UNKNOWN,
    )
