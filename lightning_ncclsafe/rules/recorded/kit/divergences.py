"""Recorded calls that differ between ranks under one number: who deviates, what each called, and how sure that is.

Where dumps have stacks, they show which call some ranks have skipped, or made alone. The causes are
mismatched-collective, where only sizes or types of one operation differ, and diverged-collectives.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations
from pathlib import PurePath

from lightning_ncclsafe.facts import Collective, Frame, RankFacts, StatementKind
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Divergence,
    Evidence,
    Finding,
    Shift,
    Timeline,
    at_words,
    call_words,
    capitalised,
    clause,
    collective_words,
    deepest_user_frame,
    evidence_about,
    finding,
    group_words,
    inside_trainer,
    location_of,
    numel,
    once,
    ranks_words,
    shift,
    signature,
)
from lightning_ncclsafe.rules.recorded.kit.calls import record_of
from lightning_ncclsafe.rules.recorded.kit.ends import failed, misled
from lightning_ncclsafe.rules.recorded.kit.evidence import described, first_site, log_evidence, one_element_evidence
from lightning_ncclsafe.rules.recorded.kit.statements import LogStatements, stated

# Operations in logs that may involve only two ranks.
OF_TWO = ("send", "recv", "recvanysource", "coalesced")
_COMPARED_CALLS = 64
# Of the ranks that have made the same call, this many are compared with the others.
_COMPARED_RANKS = 32
_MOST_SIDES = 4


@once
def conflict(view: Timeline) -> Divergence | None:
    """The first number under which ranks called what cannot complete together; None if there is none."""
    split = view.divergence
    if split is None or failed(view):
        return None
    calls = _filled_in({rank: call for rank, call in split.calls.items() if _is_comparable(view, rank, call)})
    return Divergence(split.group, split.seq, calls) if _any_differ(calls.values()) else None


def _filled_in(calls: dict[int, Collective]) -> dict[int, Collective]:
    """The calls, with what a log does not give: types, and whether an all_reduce is a barrier's.

    These are taken from the only call of a dump that it can be.
    """
    known = {signature(call): call for call in calls.values() if call.dtypes}
    if len(known) > _COMPARED_CALLS:
        return calls
    return {rank: call if call.dtypes else _as_in_dump(call, known.values()) for rank, call in calls.items()}


def _as_in_dump(call: Collective, known: Iterable[Collective]) -> Collective:
    alike = [one for one in known if not _differ(call, one)]
    return replace(call, op=alike[0].op, dtypes=alike[0].dtypes) if len(alike) == 1 else call


def _is_comparable(view: Timeline, rank: int, call: Collective) -> bool:
    """Whether the operation is known, and not a log's send or receive, whose number may be of either sequence."""
    record = view.facts[rank].record
    is_of_log = record is not None and not record.has_dump
    return bool(call.op) and not (is_of_log and call.op in OF_TWO)


def is_one_operation(split: Divergence) -> bool:
    """Whether all called the same operation, so that only sizes or types differ."""
    return len({_operation(call) for call in split.calls.values()}) == 1


def _any_differ(calls: Iterable[Collective]) -> bool:
    """Whether any two differ; details that a log does not give are no difference."""
    variants = {signature(call): call for call in calls}
    return any(_differ(one, other) for one, other in combinations(list(variants.values())[:_COMPARED_CALLS], 2))


def _differ(one: Collective, other: Collective) -> bool:
    if _operation(one) != _operation(other):
        return True
    (_, ours, our_types), (_, theirs, their_types) = signature(one), signature(other)
    if len(ours) != len(theirs):
        # A log gives the number of elements of all coalesced tensors together.
        ours, theirs = (sum(ours),), (sum(theirs),)
    return (ours != theirs and bool(numel(one) and numel(other))) or (
        our_types != their_types and bool(our_types and their_types)
    )


def _operation(call: Collective) -> str:
    """The operation; NCCL's barrier is an all_reduce."""
    return call.op.removesuffix("_barrier")


def divergence_finding(view: Timeline, split: Divergence, why: str) -> Finding:
    """The finding if the calls of the ranks are known.

    Args:
        why: What follows from it, the end of a sentence.
    """
    # Without a majority, what ranks have always called may decide.
    habit = _shifted_ranks(view, split) if len(split.deviating) == len(split.calls) else ()
    ranks = habit or split.deviating
    different = split.variants
    listed = [
        f"{ranks_words(who)} called {call_words(call)}{at_words(deepest_user_frame(call.stack))}"
        for call, who in different[:3]
    ]
    more = f" and {len(different) - 3:,} other variants" if len(different) > 3 else ""
    text = f"{' and '.join(listed)}{more} as number {split.seq:,} of {group_words(split.group)}"
    return finding(
        view,
        ranks,
        f"{text}: {why}.",
        confidence=Confidence.CERTAIN if _is_certain(view, split) and not habit else Confidence.LIKELY,
        location=_left_out_at(view, split) or first_site(split.calls[rank] for rank in ranks),
        evidence=(
            *_evidence(view, different),
            *_left_out_evidence(view, split),
            *one_element_evidence(call for call, _ in different),
        ),
    )


def stated_finding(view: Timeline, kind: StatementKind, why: str) -> Iterator[Finding]:
    """The finding if PyTorch or NCCL itself has compared the ranks.

    Args:
        why: What follows from it, the end of a sentence.
    """
    found = stated(view, kind)
    if found and conflict(view) is None and not failed(view):
        # Ranks compare themselves with one other each: the first may not have seen yet which of them is the odd one.
        said = min(found, key=lambda one: (one.count == 1, not one.ranks, len(one.ranks)))
        yield finding(
            view,
            # The same words about several ranks are one statement.
            LogStatements(one for one in found if one.detail == said.detail).ranks,
            f"{said.detail or 'a check of collectives has failed'}: {why}.",
            confidence=Confidence.POSSIBLE if said.count == 1 else Confidence.LIKELY,
            evidence=found.evidence,
        )


def _is_certain(view: Timeline, split: Divergence) -> bool:
    """Whether it is certain; in logs only for the default group, as others may share names and numbers."""
    records = [record_of(view.facts[rank]) for rank in split.calls if view.facts[rank].record is not None]
    return all(record.has_dump or (record.group_known and split.group == "0") for record in records)


def _evidence(view: Timeline, variants: list[tuple[Collective, tuple[int, ...]]]) -> Iterator[Evidence]:
    for call, who in variants[:LISTED]:
        record = view.facts[who[0]].record
        if record is not None and not record.has_dump:
            yield from log_evidence(view, who[:1])
        else:
            words = described(call) if call.stack else collective_words(call)
            yield evidence_about(who, "flight recorder", f"{capitalised(ranks_words(who))} called {words}.")
    lengths = misled(view)
    if lengths:
        text = f"{capitalised(clause(lengths, 'has|have'))} taken other data for a length"
        yield Evidence(source="log", text=f"{text}, and asked for more memory than exists: that follows from this.")


def read_other_data(view: Timeline) -> tuple[int, ...]:
    """Ranks from which others have read a number of parameters, and that have found no difference themselves.

    Every rank compares the numbers of all: if the models did differ, both sides would have found that.
    """
    found = stated(view, StatementKind.OTHER_MODEL)
    read_from = {rank for one in found for rank in one.ranks if rank != one.by}
    known = {rank for rank in read_from.intersection(view.facts) if _tells(view.facts[rank])}
    return tuple(sorted(known.difference(found.by)))


def _tells(facts: RankFacts) -> bool:
    """Whether a log shows how the rank went on."""
    record = record_of(facts)
    return record.has_log and bool(facts.exception is not None or record.waited_ms)


def _left_out_at(view: Timeline, split: Divergence) -> str:
    """The user's line of the first call that only some ranks have made; empty if stacks do not show it."""
    found = _shift(view, split.group, _compared(view, split))
    return location_of(found.frame) if found is not None else ""


def _shifted_ranks(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The ranks that have skipped a call, or made one alone; empty if stacks and later calls do not show which."""
    found = _decided_shift(view, split)
    return found.ranks if found is not None and found.count else ()


def _left_out_evidence(view: Timeline, split: Divergence) -> Iterator[Evidence]:
    """Which ranks have made a call that the others have not."""
    found = _decided_shift(view, split)
    if found is not None:
        number = f" (number {found.call.seq:,})" if found.call.seq != split.seq else ""
        yield Evidence(source="flight recorder", text=f"By their stacks, {found.words()}{number}.")


def _decided_shift(view: Timeline, split: Divergence) -> Shift | None:
    ranks = _compared(view, split)
    found = _shift(view, split.group, ranks)
    return found if found is not None and found.is_decided and len(ranks) == len(split.calls) else None


def _compared(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Ranks whose dumps are compared, some of each side; none if a side has no dump."""
    ranks: list[int] = []
    sides = split.variants
    for _, who in sides if len(sides) <= _MOST_SIDES else ():
        dumped = [rank for rank in who if record_of(view.facts[rank]).has_dump]
        if not dumped:
            return ()
        ranks += dumped[:_COMPARED_RANKS]
    return tuple(sorted(ranks))


@once
def _shift(view: Timeline, group: str, ranks: tuple[int, ...]) -> Shift | None:
    if len(ranks) < 2:
        return None
    with_sites = tuple(_with_sites(view.facts[rank], group) for rank in ranks)
    return shift(Timeline(replace(view.job, ranks=with_sites)), group)


def _with_sites(facts: RankFacts, group: str) -> RankFacts:
    calls = [call for call in facts.collectives if call.group == group]
    if not any(call.stack for call in calls):
        # The recorder has kept no stacks: calls without one are not the backward pass alone.
        return replace(facts, collectives=tuple(calls))
    return replace(facts, collectives=tuple(replace(call, site=_site(call)) for call in calls))


def _site(call: Collective) -> str:
    """What is equal on all ranks for calls from one place."""
    if not call.stack:
        return f"native:{call.op}:{numel(call)}"
    places = "|".join(map(_place, inside_trainer(call.stack)))
    return blake2b(places.encode("utf-8", "replace"), digest_size=6).hexdigest()


def _place(frame: Frame) -> str:
    return f"{'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line}:{frame.function}"
