"""Where recorded calls first differ between ranks: who deviates, what each called, and how sure that is."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations

from lightning_ncclsafe.facts import Collective, StatementKind
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Divergence,
    Evidence,
    Finding,
    Timeline,
    call_words,
    capitalised,
    collective_words,
    group_words,
    location_of,
    numel,
    once,
    ranks_words,
    short_location,
    signature,
    verb,
)
from lightning_ncclsafe.rules.recorded.questions import details_of, gone, lines_of, misled, said_of_all, stated
from lightning_ncclsafe.rules.recorded.telling import call_site, described, one_element, quotes, recorded

# Operations in logs that may involve only two ranks.
OF_TWO = ("send", "recv", "recvanysource", "coalesced")
_LISTED = 8
DEFAULT_GROUP = "0"
_COMPARED = 64


@once
def split_of(view: Timeline) -> Divergence | None:
    """The first number under which ranks called what cannot complete together; None if there is none."""
    split = view.divergence
    if split is None or gone(view):
        return None
    calls = {rank: call for rank, call in split.calls.items() if _is_comparable(view, rank, call)}
    return Divergence(split.group, split.seq, calls) if _conflict(calls.values()) else None


def _is_comparable(view: Timeline, rank: int, call: Collective) -> bool:
    """Whether the operation is known, and not a log's send or receive, whose number may be of either sequence."""
    record = view.facts[rank].record
    is_of_log = record is not None and not record.has_dump
    return bool(call.op) and not (is_of_log and call.op in OF_TWO)


def is_one_operation(split: Divergence) -> bool:
    """Whether all called the same operation, so that only sizes or types differ."""
    return len({_operation(call) for call in split.calls.values()}) == 1


def _conflict(calls: Iterable[Collective]) -> bool:
    """Whether any two differ; details that a log does not give are no difference."""
    variants = {signature(call): call for call in calls}
    return any(_differ(one, other) for one, other in combinations(list(variants.values())[:_COMPARED], 2))


def _differ(one: Collective, other: Collective) -> bool:
    if _operation(one) != _operation(other):
        return True
    (_, ours, our_types), (_, theirs, their_types) = signature(one), signature(other)
    return (ours != theirs and bool(numel(one) and numel(other))) or (
        our_types != their_types and bool(our_types and their_types)
    )


def _operation(call: Collective) -> str:
    """The operation; NCCL's barrier is an all_reduce."""
    return call.op.removesuffix("_barrier")


def split_finding(view: Timeline, split: Divergence, why: str) -> Finding:
    """The finding.

    Args:
        view: The job.
        split: Where ranks differ.
        why: What follows from it, the end of a sentence.
    """
    ranks = split.deviating
    different = _variants(split.calls)
    listed = [f"{ranks_words(who)} called {_words(call)}" for call, who in different[:3]]
    more = f" and {len(different) - 3:,} other variants" if len(different) > 3 else ""
    text = f"{' and '.join(listed)}{more} as number {split.seq:,} of {group_words(split.group)}"
    sites = (call_site(split.calls[rank]) for rank in ranks)
    return recorded(
        ranks,
        f"{capitalised(text)}: {why}.",
        confidence=Confidence.CERTAIN if _is_certain(view, split) else Confidence.LIKELY,
        location=next((location_of(site) for site in sites if site is not None), ""),
        evidence=(*_evidence(view, different), *one_element(call for call, _ in different)),
    )


def stated_finding(view: Timeline, kind: StatementKind, why: str) -> Iterator[Finding]:
    """The same where PyTorch or NCCL itself has compared the ranks; none where it has not.

    Args:
        view: The job.
        kind: The statements that are meant.
        why: What follows from it, the end of a sentence.
    """
    found = stated(view.job, kind)
    if found and split_of(view) is None and not gone(view):
        yield recorded(
            said_of_all(found[:1]),
            f"{next(details_of(found), 'a check of collectives has failed')}: {why}.",
            evidence=lines_of(found),
        )


def _is_certain(view: Timeline, split: Divergence) -> bool:
    """Whether it is certain; in logs only for the default group, as others may share names and numbers."""
    records = [record for rank in split.calls if (record := view.facts[rank].record) is not None]
    is_default = split.group == DEFAULT_GROUP
    return all(record.has_dump or (record.group_known and is_default) for record in records)


def _words(call: Collective) -> str:
    site = call_site(call)
    return call_words(call) + (f" at {short_location(site)}" if site else "")


def _variants(calls: dict[int, Collective]) -> list[tuple[Collective, list[int]]]:
    alike: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        alike[signature(call)].append(rank)
    return [(calls[ranks[0]], ranks) for ranks in sorted(alike.values(), key=lambda who: (-len(who), who))]


def _evidence(view: Timeline, variants: list[tuple[Collective, list[int]]]) -> Iterator[Evidence]:
    for call, who in variants[:_LISTED]:
        record = view.facts[who[0]].record
        if record is not None and not record.has_dump:
            yield from quotes(view.facts[who[0]])
        else:
            words = described(call) if call.stack else collective_words(call)
            rank = who[0] if len(who) == 1 else None
            yield Evidence(source="flight recorder", rank=rank, text=f"{capitalised(ranks_words(who))} called {words}.")
    lengths = misled(view)
    if lengths:
        text = f"{capitalised(ranks_words(lengths))} {verb(lengths, 'has', 'have')} taken other data for a length"
        yield Evidence(source="log", text=f"{text}, and asked for more memory than exists: that follows from this.")
