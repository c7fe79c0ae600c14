"""The cause diverged-collectives: ranks called different collectives under the same number."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import Collective, JobFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.rules.activity import Kind
from lightning_ncclsafe.rules.positions import ended_first
from lightning_ncclsafe.rules.sentences import (
    location,
    others_wait,
    phase_evidence,
    severity,
    stack_evidence,
    standing,
)
from lightning_ncclsafe.rules.timeline import Divergence, Timeline, signature, timeline
from lightning_ncclsafe.rules.units import unit_words
from lightning_ncclsafe.rules.wording import (
    call_words,
    capitalised,
    collective_words,
    condition_words,
    group_words,
    joined,
    ranks_words,
    verb,
)

_REMEDY = (
    "Make every rank call the same collectives in the same order: no self.log(sync_dist=True), metric.compute(), "
    "all_gather, barrier, trainer.log_dir or save_checkpoint under a condition on the rank or on the data, the same "
    "keys in log_dict on all ranks, and the same branches of the model in forward."
)


def diverged_collectives(job: JobFacts) -> Iterable[Finding]:
    """Ranks of a group called different collectives, so that none of them can complete.

    Symptom:
        A timeout in which ranks report different operations or sizes for one sequence number, or nothing at all.

    Cause:
        A collective under a condition that holds on some ranks only: on the rank, on the data, in an except block.

    Remedy:
        Make every rank call the same collectives in the same order.

    Cannot see:
        Where older collectives were called: only the present line of each rank is known, and the recorder's past is
        limited.
    """
    view = timeline(job)
    if ended_first(view) or view.raised:
        return
    if view.divergence is not None:
        yield _mismatch(view, view.divergence)
    elif crossed := _crossed(view):
        yield _crossing(view, crossed)
    elif sites := _other_call_sites(view):
        yield _call_sites(view, sites)


def _mismatch(view: Timeline, split: Divergence) -> Finding:
    ranks = _culprits(view, split)
    text = f"{_calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    condition = _condition(view, ranks[0])
    under = f", under {condition_words(condition)}" if condition else ""
    stands = f"{capitalised(ranks_words(ranks[:1]))} stands {standing(view, ranks[0])}{under}."
    return Finding(
        rule="diverged-collectives",
        severity=severity(view.job),
        confidence=Confidence.CERTAIN,
        summary=joined((f"{capitalised(text)}: these can never complete together.", stands)),
        ranks=ranks,
        location=location(view, ranks),
        evidence=(*_call_evidence(split), *_where(view, split.calls)),
        remedy=_REMEDY,
    )


def _culprits(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority; between equals those whose line stands under a condition on the rank."""
    ranks = split.deviating
    conditioned = tuple(rank for rank in ranks if _condition(view, rank))
    return conditioned if conditioned and len(ranks) == len(split.calls) else ranks


def _condition(view: Timeline, rank: int) -> str:
    return view.activities[rank].rank_condition


def _variants(calls: dict[int, Collective]) -> list[tuple[Collective, list[int]]]:
    alike: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        alike[signature(call)].append(rank)
    return [(calls[ranks[0]], ranks) for ranks in sorted(alike.values(), key=lambda who: (-len(who), who))]


def _calls_words(view: Timeline, split: Divergence) -> str:
    variants = _variants(split.calls)
    listed = [f"{ranks_words(who)} called {_call_words(view, call, who[0])}" for call, who in variants[:3]]
    return " and ".join(listed) + (f" and {len(variants) - 3} other variants" if len(variants) > 3 else "")


def _call_words(view: Timeline, call: Collective, rank: int) -> str:
    return joined((call_words(call), f"for {words}" if (words := unit_words(call, view.facts[rank])) else ""))


def _call_evidence(split: Divergence) -> Iterator[Evidence]:
    for call, who in _variants(split.calls)[:8]:
        text = f"{capitalised(ranks_words(who))} called {collective_words(call)}."
        yield Evidence(source="flight recorder", rank=who[0] if len(who) == 1 else None, text=text)


def _where(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    listed = sorted(ranks)[:4]
    yield from stack_evidence(view, listed)
    yield from phase_evidence(view, listed)


def _crossed(view: Timeline) -> tuple[int, ...]:
    """Ranks that others wait for and that wait themselves, elsewhere: the wait is a circle."""
    if view.working(view.facts) or any(facts.exception for facts in view.facts.values()):
        return ()
    return tuple(rank for rank in view.behind if view.activities[rank].waits_for_peers)


def _crossing(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    text = f"{ranks_words(ranks)} {verb(ranks, 'waits', 'wait')} elsewhere than the ranks that wait for it"
    return Finding(
        rule="diverged-collectives",
        severity=severity(view.job),
        confidence=Confidence.LIKELY,
        summary=f"{capitalised(text)}: {others_wait(view, ())}.",
        ranks=ranks,
        location=location(view, ranks),
        evidence=tuple(_where(view, view.facts)),
        remedy=_REMEDY,
    )


def _other_call_sites(view: Timeline) -> tuple[int, ...]:
    """Ranks that joined the same collective from another function than most did."""
    sites: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in view.waiting:
        doing = view.activities[rank]
        # With several outstanding the stack says nothing about the oldest.
        if doing.kind is not Kind.COLLECTIVE or doing.frame is None or not _sole(view, rank):
            return ()
        sites[(doing.frame.file, doing.frame.function)].append(rank)
    if len(sites) < 2 or not any(view.joined(group) for group in view.groups):
        return ()
    most = max(sites.values(), key=len)
    few = tuple(rank for who in sites.values() if who is not most for rank in who)
    return tuple(sorted(few if len(few) < len(most) else (*few, *most)))


def _sole(view: Timeline, rank: int) -> bool:
    pending = [entry for entry in view.facts[rank].collectives if not entry.completed and not entry.is_p2p]
    return len(pending) == 1 and not view.activities[rank].on_device


def _call_sites(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    text = f"{ranks_words(ranks)} joined the same collective from another place than the other ranks"
    return Finding(
        rule="diverged-collectives",
        severity=severity(view.job),
        confidence=Confidence.LIKELY,
        summary=f"{capitalised(text)}, {standing(view, ranks[0])}: {others_wait(view, ())}.",
        ranks=ranks,
        location=location(view, ranks),
        evidence=tuple(_where(view, view.facts)),
        remedy=_REMEDY,
    )
