"""The cause unused-parameters: one rank's step did not use a part of the model, and its peers wait for it."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_ncclsafe.code.libraries import BACKWARD, FORWARD
from lightning_ncclsafe.facts import Branch, Collective, Frame, RankFacts, StepFacts, UnitKind
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    DecidingBranches,
    Divergence,
    Evidence,
    Finding,
    LeftOutUnit,
    Plan,
    Severity,
    Shift,
    Timeline,
    aborted_by_gloo,
    alone_in_trainer,
    batch_words,
    call_evidence,
    call_location,
    clause,
    collective_words,
    condition_place,
    condition_words,
    counted,
    culprits,
    decision,
    different_counts,
    ended_process_evidence,
    exception_evidence,
    finding,
    finished_ahead,
    gathering_alone,
    hang_rule,
    how_we_know,
    is_in,
    is_in_action,
    joined,
    left_out_unit,
    location_of,
    message_of,
    once,
    out_of_data_first,
    ranks_words,
    send_different_units,
    shift,
    short_location,
    short_place,
    signature,
    unit_of,
    unit_words,
    verb,
    where_words,
    while_others_wait,
)

_REFUSED = "Expected to have finished reduction in the prior iteration"
_NAMES = 4
_MOST_FROZEN = 8
_REMEDY_DDP = (
    "Let every rank use every part of the model in every step: if a rank's data does not need a branch, add its output "
    "times 0 to the loss. find_unused_parameters=True lets DDP continue without them, at the cost of a search in each "
    "step; parameters that nothing uses should have requires_grad=False."
)
_REMEDY_FROZEN = (
    "Freeze the same parameters on all ranks after the same step: by the number of the epoch or step, or let one rank "
    "decide and broadcast it (trainer.strategy.broadcast). DDP goes on without what is frozen in the course of "
    "training only with find_unused_parameters=True, at the cost of a search in each step."
)
_REMEDY_FSDP = (
    "Let every rank run every wrapped part of the model in every step, on a dummy input where its data does not need "
    "it, or wrap the branches together so that they are gathered as one."
)
_DECIDES = " The ranks' lines in forward decide: if they agree, the parts are called in a different order."


@hang_rule(
    after="skipped-step",
    follows=("different-trainer-settings", "stopped-early", "skipped-step"),
    reads_exceptions=True,
    plan=Plan.STOP,
)
def unused_parameters(view: Timeline) -> Iterator[Finding]:
    """A rank's step left out a part of the model whose parameters or gradients the others exchange.

    Symptom:
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one", or the
        others wait in the all-reduce of a bucket in backward while the rank is in something later. With FSDP, ranks
        gather different units.

    Cause:
        A data-dependent graph: an expert or a modality without a token, a branch of forward, a loss without a term.

    Remedy:
        Use every part on every rank, or find_unused_parameters=True.

    Cannot see:
        Which line left the part out if its name does not appear in forward or training_step; under FSDP, units of equal
        size that are run outside of forward.
    """
    refused = tuple(rank for rank in view.raised if message_of(view.facts[rank]).startswith(_REFUSED))
    if refused:
        yield _refusal(view, refused)
    elif not view.raised and not gathering_alone(view) and not alone_in_trainer(view):
        incomplete = _with_incomplete_pass(view)
        if incomplete:
            yield _incomplete(view, incomplete)
        elif lacking := _without_gradient(view):
            yield _reduced_less(view, lacking)
        elif (split := _gathering_different_units(view)) is not None:
            yield _different_units(view, split)
        elif (unit := left_out_unit(view)) is not None:
            # With a backward pass, it is a step.
            yield from () if unit.passes else (_left_out(view, unit),)
        elif (skipped := _skipped_unit(view)) is not None:
            yield _skipped(view, *skipped)


def _with_incomplete_pass(view: Timeline) -> tuple[int, ...]:
    """Ranks that have left the backward pass in which peers wait for a bucket's all-reduce, without calling it.

    They have made as many backward passes as the peers have begun, or lack gradients that the peers have.
    """
    awaited = {rank: call for rank in view.waiting if (call := _bucket_call(view, rank)) is not None}
    past = [rank for rank in sorted(view.facts.keys() - awaited.keys()) if _is_past(view, rank, awaited)]
    if not past:
        return ()
    known = different_counts(view)
    if known is not None and known.are_exchanged:
        return ()
    begun = max(view.facts[rank].steps.with_backward for rank in awaited)
    everywhere = _unused_by_peers(view)
    steps = ((rank, view.facts[rank].steps) for rank in past)
    return tuple(
        rank
        for rank, made in steps
        if 0 < begun <= made.with_backward or not everywhere.issuperset(made.without_gradient)
    )


def _without_gradient(view: Timeline) -> tuple[int, ...]:
    """Ranks whose loss depended on no parameter of a sharded model, or which froze some: FSDP reduced less there."""
    is_sharded = any(unit.kind is UnitKind.FSDP_UNIT for facts in view.facts.values() for unit in facts.units)
    if not is_sharded or not (view.divergence or aborted_by_gloo(view) or finished_ahead(view)):
        return ()
    constant = tuple(rank for rank, facts in sorted(view.facts.items()) if facts.steps.without_graph)
    ranks = constant or tuple(_frozen_alone(view))
    return ranks if len(ranks) < len(view.facts) else ()


def _is_past(view: Timeline, rank: int, awaited: dict[int, Collective]) -> bool:
    """Whether a rank is not in a backward pass and has not called something that others wait in, under any number."""
    if is_in_action(view.facts[rank].progress, ".backward"):
        return False
    calls = {(call.group, call.seq, signature(call)): call for call in awaited.values()}
    return any(_has_left_out(view, rank, call) for call in calls.values())


def _has_left_out(view: Timeline, rank: int, call: Collective) -> bool:
    group = view.groups_by_name.get(call.group)
    later = (one for one in view.facts[rank].collectives if one.group == call.group and one.seq >= call.seq)
    is_member = group is None or rank in group.members
    return is_member and all(signature(one) != signature(call) for one in later)


def _unused_by_peers(view: Timeline) -> set[str]:
    """Parameters without a gradient on ranks that wait in a bucket's all-reduce, whose gradients are complete."""
    waiting = (view.facts[rank].steps for rank in view.waiting if _bucket_call(view, rank) is not None)
    return {name for steps in waiting for name in steps.without_gradient}


def _lacks(view: Timeline, rank: int) -> tuple[str, ...]:
    """Parameters without a gradient on this rank that have one on the waiting peers."""
    everywhere = _unused_by_peers(view)
    return tuple(name for name in view.facts[rank].steps.without_gradient if name not in everywhere)


def _bucket_call(view: Timeline, rank: int) -> Collective | None:
    """The all-reduce of a DDP bucket that a rank waits in; None if it waits in something else."""
    call = view.activities[rank].collective
    unit = unit_of(call, view.facts[rank]) if call is not None else None
    return call if unit is not None and unit.kind is UnitKind.DDP_BUCKET else None


def _gathering_different_units(view: Timeline) -> Divergence | None:
    """The calls in which ranks gather different units of the model in the same batch; None if they do not."""
    split = view.divergence
    if split is None or out_of_data_first(view):
        return None
    first = shift(view, split.group)
    if first is not None and first.is_decided and first.frame is not None and first.call.seq < split.seq:
        # An earlier call has moved them apart.
        return None
    places = {(view.facts[rank].progress.epoch, view.facts[rank].progress.batch_idx) for rank in split.calls}
    return split if len(places) == 1 and send_different_units(view, split) else None


def _skipped_unit(view: Timeline) -> tuple[Shift, DecidingBranches] | None:
    """The first call that some ranks have left out, if it gathers a part of the model that a module's forward runs.

    A branch of that very function has led around it: one further out leads around the whole model.
    """
    split = view.divergence
    first = shift(view, split.group) if split is not None else None
    if first is None or first.frame is None or first.ranks != first.others:
        return None
    unit, deciding = unit_of(first.call, view.facts[first.callers[0]]), decision(view, location_of(first.frame))
    if unit is None or unit.kind is not UnitKind.FSDP_UNIT or deciding is None:
        return None
    is_own = all(frame.function == first.frame.function for frame, _ in deciding.branches)
    return (first, deciding) if is_own and is_in(FORWARD, [first.frame]) else None


def _refusal(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    names = _lacks(view, ranks[0])
    which = _which(names, facts) if names else "some parameters"
    frozen = _which(facts.steps.frozen, facts) if facts.steps.frozen else ""
    since = f" (frozen in the course of training: {frozen})" if frozen else ""
    text = (
        f"{ranks_words(ranks)} had no gradient for {which} in the step before {batch_words(facts.progress)}, so "
        f"DDP could not reduce them and raised{since}{while_others_wait(view, ranks)}."
    )
    # DDP raises the same in the forward pass after a backward pass that an exception has ended, if that was caught.
    was_ended = any(error.passed.endswith("backward") or is_in(BACKWARD, error.stack) for error in facts.caught)
    confidence = Confidence.LIKELY if was_ended else Confidence.CERTAIN
    remedy = _REMEDY_FROZEN if _is_frozen(facts.steps) else _REMEDY_DDP
    return _finding(view, ranks, text, confidence, remedy, Severity.ERROR)


def _which(names: tuple[str, ...], facts: RankFacts) -> str:
    count = max(facts.steps.without_gradient_count, len(names))
    listed = ", ".join(names[:_NAMES])
    return f"{count} parameters ({listed}, …)" if count > _NAMES else listed


def _incomplete(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts, names = view.facts[ranks[0]], _lacks(view, ranks[0])
    which = _which(names, facts) if names else "a part of the model"
    if facts.steps.without_graph:
        which = "any of it, because its loss depends on no parameters"
    text = (
        f"{clause(ranks, 'has|have left the backward pass in which')} "
        f"{verb(ranks, 'its', 'their')} peers wait, without a gradient for {which}, and "
        f"{verb(ranks, 'is', 'are')} now {where_words(view, ranks[0])}{while_others_wait(view, ranks)}."
    )
    return _finding(view, ranks, text, Confidence.LIKELY, _REMEDY_DDP, None)


@once
def _frozen_alone(view: Timeline) -> dict[int, tuple[str, ...]]:
    """By rank, the parameters that it has frozen since training began and not all others have; empty if unknown.

    A callback may freeze them on all ranks as an epoch or a batch begins, which not all have come to.
    """
    steps = {rank: facts.steps for rank, facts in sorted(view.facts.items())}
    places = {(facts.progress.epoch, facts.progress.batch_idx) for facts in view.facts.values()}
    by_epoch = all("epoch" in place.rpartition(" in ")[2] for one in steps.values() for place in one.frozen_at)
    is_one_place = len({place[:1] if by_epoch else place for place in places}) == 1
    # Of many, only the first are listed.
    are_all_listed = all(len(one.frozen) < _MOST_FROZEN for one in steps.values())
    if not is_one_place or not (are_all_listed or any(not one.frozen for one in steps.values())):
        return {}
    everywhere = set.intersection(*({*one.frozen} for one in steps.values()))
    alone = {rank: tuple(name for name in one.frozen if name not in everywhere) for rank, one in steps.items()}
    return {rank: names for rank, names in alone.items() if names}


def _reduced_less(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    steps = view.facts[ranks[0]].steps
    if steps.without_graph:
        batches = f"{steps.without_graph} of {verb(ranks, 'its', 'their')} batches"
        why = f"The loss of {ranks_words(ranks)} depended on no parameter in {batches}"
    else:
        names = _frozen_alone(view)[ranks[0]]
        listed = ", ".join(names[:_NAMES]) + (", …" if len(names) > _NAMES else "")
        why = f"{ranks_words(ranks)} froze {listed} after training began"
    text = (
        f"{why}, so FSDP reduced fewer gradients there than on the other ranks, and later calls were paired with the "
        f"wrong ones{while_others_wait(view, ranks)}."
    )
    return _finding(view, ranks, text, Confidence.LIKELY, _REMEDY_FSDP, None)


def _different_units(view: Timeline, split: Divergence) -> Finding:
    ranks = culprits(view, split)
    # Else only the call itself can be named.
    sent = {rank: unit_words(call, view.facts[rank]) or collective_words(call) for rank, call in split.calls.items()}
    other = next(rank for rank, words in sent.items() if words != sent[ranks[0]])
    text = (
        f"{clause(ranks, 'waits|wait in')} {sent[ranks[0]]}, and {ranks_words([other])} in {sent[other]}, both as "
        f"number {split.seq}: they run different parts of the model, {where_words(view, ranks[0])}."
    )
    return _finding(view, ranks, text, Confidence.LIKELY, _REMEDY_FSDP + _DECIDES, None, split, is_backward=False)


def _left_out(view: Timeline, unit: LeftOutUnit) -> Finding:
    found = _finding(
        view, unit.others, unit.words(view), Confidence.LIKELY, _REMEDY_FSDP, Severity.ERROR, is_backward=False
    )
    evidence = (*ended_process_evidence(view, unit.ended), *found.evidence)
    return replace(found, location=unit.deciding.differs_at, decided_at=unit.deciding.condition_at, evidence=evidence)


def _skipped(view: Timeline, first: Shift, deciding: DecidingBranches) -> Finding:
    text = (
        f"{clause(first.ranks, 'has|have left out')} the part of the model at {short_location(deciding.at)} that "
        f"{ranks_words(first.callers)} ran, and so did not gather its parameters: later calls are paired with the "
        f"wrong ones{while_others_wait(view, first.ranks)}."
    )
    return finding(
        view,
        first.ranks,
        joined((text, deciding.words())),
        location=deciding.differs_at or location_of(deciding.at),
        decided_at=deciding.condition_at,
        evidence=(*call_evidence(view.divergence), *deciding.evidence(), *how_we_know(view, first.ranks)),
        remedy=_REMEDY_FSDP,
    )


def _finding(
    view: Timeline,
    ranks: tuple[int, ...],
    text: str,
    confidence: Confidence,
    remedy: str,
    severity: Severity | None,
    split: Divergence | None = None,
    *,
    is_backward: bool = True,
) -> Finding:
    """The finding; in a forward pass, a missing gradient is no evidence, as no parameter has one yet."""
    location = _location(view, ranks[0]) or (call_location(view, ranks) if split is not None else "")
    steps = view.facts[ranks[0]].steps
    under = steps.unused_under if is_backward and location == steps.unused_at else None
    decided_at, words = _decision(location, under) if under is not None else ("", "")
    is_at_jump = under is not None and bool(under.jump) and not under.differs_at
    return finding(
        view,
        ranks,
        joined((text, words)),
        severity=severity,
        confidence=confidence,
        # What a rank has left out is decided before it; a jump may be where it left.
        location=location if is_at_jump else decided_at or location,
        decided_at=decided_at,
        evidence=(*(_evidence(view, ranks) if is_backward else ()), *how_we_know(view, ranks)),
        remedy=remedy,
    )


def _location(view: Timeline, rank: int) -> str:
    """The line that left the part out, if only one may have; else the line that uses it, if known."""
    steps = view.facts[rank].steps
    is_frozen = _is_frozen(steps)
    lines = steps.frozen_at if is_frozen else steps.leaves_at
    return lines[0] if len(lines) == 1 else "" if is_frozen else steps.unused_at


def _decision(used_at: str, under: Branch) -> tuple[str, str]:
    """Where it is decided whether the line that uses the part is run, or a jump skips it, and a sentence about it."""
    file, _, rest = used_at.rpartition(":")
    function = rest.partition(" in ")[2]
    if under.jump:
        condition_at = condition_place(under.test, Frame(file=file, line=under.line, function=function))
        return condition_at, f"The `{under.jump}` at {short_place(used_at)} is under {condition_words(under.test)}."
    decided_at = f"{file}:{under.line} in {function}"
    return decided_at, f"Whether {short_place(used_at)} is run may be decided by {condition_words(under.test)}."


def _is_frozen(steps: StepFacts) -> bool:
    """Whether what has no gradient has probably been frozen, rather than left out."""
    return bool(steps.frozen) and not steps.without_graph


def _evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    for rank in ranks[:LISTED]:
        facts = view.facts[rank]
        yield from exception_evidence(facts)
        if facts.steps.with_backward:
            text = f"Has made a backward pass in {counted(facts.steps.with_backward, 'batch')}."
            yield Evidence(source="steps", rank=rank, text=text)
        if facts.steps.without_gradient:
            text = f"Has no gradient for {_which(facts.steps.without_gradient, facts)}."
            yield Evidence(source="parameters", rank=rank, text=text)
        if facts.steps.unused_at and not _is_frozen(facts.steps):
            text = f"The part is used, or left out, at {facts.steps.unused_at}."
            yield Evidence(source="source code", rank=rank, text=text)
        for lines, what in ((facts.steps.frozen_at, "freezes"), (facts.steps.leaves_at, "makes the loss without it")):
            for line in lines:
                yield Evidence(source="source code", rank=rank, text=f"May be what {what}: {line}.")
