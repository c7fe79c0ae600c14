"""Recorded calls that differ between ranks under one number: who deviates, what each called, and how sure that is.

The causes are mismatched-collective, where only sizes or types of one operation differ, and diverged-collectives.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

from lightning_ncclsafe.facts import Collective, RankFacts, StatementKind
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Divergence,
    Evidence,
    Finding,
    Plan,
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
    numel,
    once,
    ranks_words,
    recorded_rule,
    signature,
)
from lightning_ncclsafe.rules.recorded.call_sites import left_out_at, left_out_evidence, out_of_step
from lightning_ncclsafe.rules.recorded.calls import record_of
from lightning_ncclsafe.rules.recorded.ends import failed, misled
from lightning_ncclsafe.rules.recorded.evidence import described, first_site, log_evidence, one_element_evidence
from lightning_ncclsafe.rules.recorded.statements import LogStatements, stated

# Operations in logs that may involve only two ranks.
OF_TWO = ("send", "recv", "recvanysource", "coalesced")
_LISTED = 8
_COMPARED = 64


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
    if len(known) > _COMPARED:
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


def _is_one_operation(split: Divergence) -> bool:
    """Whether all called the same operation, so that only sizes or types differ."""
    return len({_operation(call) for call in split.calls.values()}) == 1


def _any_differ(calls: Iterable[Collective]) -> bool:
    """Whether any two differ; details that a log does not give are no difference."""
    variants = {signature(call): call for call in calls}
    return any(_differ(one, other) for one, other in combinations(list(variants.values())[:_COMPARED], 2))


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


def _finding(view: Timeline, split: Divergence, why: str) -> Finding:
    """The finding if the calls of the ranks are known.

    Args:
        why: What follows from it, the end of a sentence.
    """
    # Without a majority, what ranks have always called may decide.
    habit = out_of_step(view, split) if len(split.deviating) == len(split.calls) else ()
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
        location=left_out_at(view, split) or first_site(split.calls[rank] for rank in ranks),
        evidence=(
            *_evidence(view, different),
            *left_out_evidence(view, split),
            *one_element_evidence(call for call, _ in different),
        ),
    )


def _stated_finding(view: Timeline, kind: StatementKind, why: str) -> Iterator[Finding]:
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
    for call, who in variants[:_LISTED]:
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


def _apart(view: Timeline) -> tuple[int, ...]:
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


def _of_models(view: Timeline) -> Iterator[Finding]:
    """DDP has compared the numbers of parameters, as they were read."""
    found = stated(view, StatementKind.OTHER_MODEL)
    if not found or _apart(view) or conflict(view) is not None or failed(view):
        return
    ranks = found[0].ranks
    who = next(iter(rank for rank in ranks if rank != found[0].by), ranks[0])
    is_mutual = len(set(found.by) & set(ranks)) > 1
    why = "the models differ"
    if not is_mutual:
        why = f"the models differ, or rank {who} called something else there, as nothing checks what was read"
    yield finding(view, ranks, f"{capitalised(found[0].detail)}: {why}.", evidence=found.evidence)


def _of_no_models(view: Timeline) -> Iterator[Finding]:
    """What ranks have read as numbers of parameters are other data."""
    ranks, found = _apart(view), stated(view, StatementKind.OTHER_MODEL)
    if not ranks or conflict(view) is not None or failed(view):
        return
    text = f"{ranks_words(ranks)} called something else where {ranks_words(found.by)} compared their models"
    why = f"{found[0].detail}, which is other data, as {ranks_words(ranks)} found no difference"
    yield finding(view, ranks, f"{capitalised(text)}: {why}.", evidence=found.evidence)


_WHY_MISMATCHED = "the operation differs in size or type between ranks and cannot complete"


@recorded_rule(
    after="dead-rank",
    remedy=(
        "Either tensors differ: give this collective one shape and type on all ranks (pad them, or exchange their "
        "sizes first), and look for a last batch that is shorter on one rank. Or ranks are in different calls of one "
        "operation: one of them skipped a collective or called an extra one, under a condition on the rank or on the "
        "data. The lines that called them decide: record with TORCH_FR_BUFFER_SIZE=2000 if they are not given. No "
        "timeout is long enough."
    ),
    plan=Plan.STOP,
    is_mutual=True,
)
def mismatched_collective(view: Timeline) -> Iterator[Finding]:
    """Under one sequence number of a group, the number of elements or the type of one operation differs between ranks.

    Symptom:
        The ranks' timeouts have the same SeqNum and OpType but different NumelIn on some of them; "Detected mismatch
        between collectives on ranks" (TORCH_DISTRIBUTED_DEBUG=DETAIL).

    Cause:
        A tensor whose shape depends on the rank's data; a rank that is one collective ahead of the others or behind.

    Remedy:
        Make the tensors, or the order of calls, identical on all ranks.

    Cannot see:
        Which of the two it is, if the recorder kept no stacks; sizes that may differ (all_to_all, coalesced).
    """
    split = conflict(view)
    if split is not None and _is_one_operation(split):
        yield _finding(view, split, _WHY_MISMATCHED)
    yield from _stated_finding(view, StatementKind.OTHER_SIZES, _WHY_MISMATCHED)
    yield from _of_models(view)


_WHY_DIVERGED = "these can never complete together"
_UNLESS = "unless one of them still calls what the others wait in, these never complete"


@recorded_rule(
    after="mismatched-collective",
    remedy=(
        "Make every rank call the same collectives in the same order: no self.log(sync_dist=True), metric.compute(), "
        "all_gather, barrier or save_checkpoint under a condition on the rank or on the data, equally many batches on "
        "all ranks, and the same branches of the model in forward. No timeout is long enough for this."
    ),
    follows=("crossed-groups", "mismatched-collective"),
    reads_exceptions=True,
    plan=Plan.STOP,
    is_mutual=True,
)
def diverged_collectives(view: Timeline) -> Iterator[Finding]:
    """Under one sequence number of a group, ranks recorded different operations, sizes or types.

    Symptom:
        The ranks' timeouts have the same SeqNum but different OpType or NumelIn on some of them; "Detected mismatch
        between collectives on ranks" (TORCH_DISTRIBUTED_DEBUG=DETAIL).

    Cause:
        A collective under a condition that holds on some ranks only; a rank that is a batch ahead; different branches.

    Remedy:
        Make every rank call the same collectives in the same order.

    Cannot see:
        What came before the recorder's oldest entry: this is the first difference among the entries that were kept.
    """
    split = conflict(view)
    if split is not None and not _is_one_operation(split):
        yield _finding(view, split, _WHY_DIVERGED)
    yield from _stated_finding(view, StatementKind.OTHER_OPERATIONS, _WHY_DIVERGED)
    yield from _of_no_models(view)
    for unsure in _stated_finding(view, StatementKind.APART, _UNLESS):
        yield replace(unsure, confidence=Confidence.POSSIBLE)
