"""The cause skipped-step: a rank skipped the backward pass of a batch, in which its peers wait for it."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import BACKWARD, SKIPPING_REFUSED
from lightning_ncclsafe.facts import Collective, Phase, RankFacts, StepFacts, UnitKind
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    DecidingBranches,
    DifferentCounts,
    Evidence,
    Finding,
    LeftOutUnit,
    Plan,
    Severity,
    Shift,
    Timeline,
    alone_in_trainer,
    batch_words,
    capitalised,
    clause,
    decision,
    different_counts,
    ended_process_evidence,
    exception_evidence,
    exception_place,
    finding,
    hang_rule,
    how_we_know,
    is_in,
    is_in_action,
    joined,
    left_out_unit,
    location_of,
    message_of,
    phase_evidence,
    ranks_words,
    shift,
    short_location,
    short_place,
    signature,
    skips_steps,
    unit_of,
    verb,
    wait_words,
    where_words,
    while_others_wait,
)

# Of a recorded call only the user's frames are known.
_BACKWARD = re.compile(r"\b(?:manual_)?backward\(")
_OTHERS = 3
_REMEDY_PASSES = (
    "Make the same backward passes on all ranks in every batch: decide from the batch's index whether an optimizer has "
    "its turn, or agree on it first; if a loss is unusable, run the backward pass with 0 times the loss. Training "
    "since that batch has mixed gradients: resume from a checkpoint before it."
)
_REMEDY_STEPS = (
    "Let all ranks make an optimizer step in the same batches: decide from the batch's index, or agree on it first. "
    "This alone makes no rank wait; look at what else the same condition decides."
)


@hang_rule(
    after="exception-during-save",
    remedy=(
        "Let all ranks skip a batch or none: agree on it first (reduce a flag over all ranks and skip if any has set "
        "it), or run the backward pass with a loss of 0 times the model's output, so that the gradients of a bad batch "
        "are 0."
    ),
    follows=("different-trainer-settings", "stopped-early"),
    reads_exceptions=True,
    plan=Plan.STOP,
)
def skipped_step(view: Timeline) -> Iterator[Finding]:
    """One rank skipped a backward pass of a batch, and so exchanged no gradients for it.

    Symptom:
        "Skipping the `training_step` by returning None in distributed training is not supported", or the others wait in
        the gradients' all-reduce while the rank is in a later batch.

    Cause:
        "return None" for a batch without labels, with a loss that is not finite, or after an out-of-memory error; with
        manual optimization, a turn of one optimizer (a GAN's generator) that one rank skips, or gradients that ranks
        accumulate over different numbers of batches.

    Remedy:
        Skip on all ranks or on none.

    Cannot see:
        A backward pass called as loss.backward() instead of self.manual_backward(loss); which of several return
        statements it was; that a context manager of another file has caught an exception.
    """
    refused = tuple(rank for rank in view.raised if message_of(view.facts[rank]).startswith(SKIPPING_REFUSED))
    if refused:
        # Which of several lines returned nothing is not recorded.
        steps = view.facts[refused[0]].steps
        is_guess = len(steps.returns_nothing) > 1 and len(_leading(view, steps)) != 1
        yield _finding(view, refused, Confidence.LIKELY if is_guess else Confidence.CERTAIN)
    elif view.waiting and not view.raised and not alone_in_trainer(view):
        skipped = _skipped_more(view)
        other = different_counts(view)
        if skipped:
            yield _finding(view, skipped, Confidence.LIKELY)
        elif other is not None and not other.is_more:
            yield _counts_finding(view, other)
        elif other is None and (left_out := _pass_left_out(view)) is not None:
            yield _left_out_finding(view, left_out)
        elif other is None and (unit := left_out_unit(view)) is not None and unit.passes:
            yield _unit_left_out_finding(view, unit)
        elif other is None and (ahead := _in_a_later_batch(view)):
            yield _inspected_finding(view, ahead)


class _PassLeftOut(NamedTuple):
    """A pass of training_step that some ranks have left out, as a call of it shows.

    Attributes:
        shift: That call.
        deciding: What has led these ranks around it.
        is_backward: Whether it is the backward pass that the user's line makes; otherwise a forward pass.
    """

    shift: Shift
    deciding: DecidingBranches
    is_backward: bool


def _pass_left_out(view: Timeline) -> _PassLeftOut | None:
    """The pass that some ranks have left out in training_step: a backward pass, or the forward pass of a sharded model.

    A forward pass counts only if a jump has led around it. None if there is none.
    """
    split = view.divergence
    first = shift(view, split.group) if split is not None else None
    if first is None or first.ranks != first.others or first.frame is None:
        return None
    caller = view.facts[first.callers[0]]
    deciding = decision(view, location_of(first.frame))
    is_in_step = is_in_action(caller.progress, ".training_step")
    if deciding is None or len(deciding.branches) != 1 or not is_in_step:
        return None
    if _BACKWARD.search(first.frame.code):
        return _PassLeftOut(first, deciding, is_backward=True)
    unit = unit_of(first.call, caller)
    is_forward = unit is not None and unit.kind is UnitKind.FSDP_UNIT and bool(deciding.branches[0][1].jump)
    return _PassLeftOut(first, deciding, is_backward=False) if is_forward else None


def _left_out_finding(view: Timeline, left_out: _PassLeftOut) -> Finding:
    first, deciding, is_backward = left_out
    made = f"a {'backward' if is_backward else 'forward'} pass at {short_location(deciding.at)}"
    text = joined(
        (
            f"{clause(first.ranks, 'has|have')} skipped {made} that {ranks_words(first.callers)} made"
            f"{'' if is_backward else ', and its backward pass'}.",
            deciding.words(),
            f"{capitalised(ranks_words(first.ranks))} {_now_words(view, first.ranks)}"
            f"{while_others_wait(view, first.ranks)}.",
        )
    )
    # A condition is around the pass, whose line is named; a jump has its own line.
    is_around = not deciding.branches[0][1].jump
    return finding(
        view,
        first.ranks,
        text,
        confidence=Confidence.LIKELY,
        location=location_of(first.frame) if is_around else deciding.differs_at,
        decided_at=deciding.condition_at,
        evidence=how_we_know(view, first.ranks),
        remedy=_REMEDY_PASSES,
    )


def _unit_left_out_finding(view: Timeline, unit: LeftOutUnit) -> Finding:
    passes = f"The backward pass at {short_place(unit.passes[0])} is behind the same condition."
    return finding(
        view,
        unit.others,
        joined((unit.words(view), passes)),
        confidence=Confidence.LIKELY,
        location=unit.deciding.differs_at,
        decided_at=unit.deciding.condition_at,
        evidence=(*ended_process_evidence(view, unit.ended), *how_we_know(view, unit.others)),
        remedy=_REMEDY_PASSES,
    )


def _in_a_later_batch(view: Timeline) -> tuple[int, ...]:
    """Inspected ranks in a later batch of the epoch than the one in whose backward pass all others wait."""
    now = {rank: facts.progress for rank, facts in sorted(view.facts.items())}
    passes = {rank: now[rank].batch_idx for rank in view.waiting if is_in(BACKWARD, view.facts[rank].stack)}
    ahead = tuple(rank for rank in now if rank not in passes)
    are_inspected = all(facts.inspection is not None for facts in view.facts.values())
    epochs = {each.epoch for each in now.values()}
    is_one_epoch = len(epochs) == 1 and -1 not in epochs
    are_training = all(each.phase is Phase.TRAIN for each in now.values())
    if not (are_inspected and passes and is_one_epoch and are_training) or not view.all_wait:
        return ()
    # Accumulated gradients are also exchanged in a rank's last batch.
    if any(now[rank].is_last_batch for rank in passes):
        return ()
    is_past = len({*passes.values()}) == 1 and all(now[rank].batch_idx > max(passes.values()) >= 0 for rank in ahead)
    return ahead if is_past else ()


def _inspected_finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    others = view.besides(ranks)
    there, here = (view.facts[some[0]].progress for some in (ranks, others))
    return finding(
        view,
        ranks,
        f"{clause(ranks, 'has|have continued')} to {batch_words(there)} without exchanging gradients in batch "
        f"{here.batch_idx}, in whose backward pass {clause(others, 'waits|wait')}: "
        f"{verb(ranks, 'it', 'they')} skipped a backward pass, or DDP's parameters had no gradient in it, or "
        f"{ranks_words(others)} made one more.",
        # Each of these looks the same from outside.
        confidence=Confidence.POSSIBLE,
        location="",
        evidence=(*phase_evidence(view, view.facts), *how_we_know(view, view.facts)),
    )


def _counts_finding(view: Timeline, counts: DifferentCounts) -> Finding:
    ranks = counts.ranks
    # Ranks need each other for backward passes, but not for an optimizer's step.
    so = "so since then gradients of different passes are reduced together, or wait for each other"
    if not counts.are_exchanged:
        so = "so their weights are no longer the same"
    left = tuple(rank for rank in view.finished if rank not in ranks)
    finished = f"; {clause(left, 'has|have finished')}" if left else ""
    text = (
        f"Ranks have made different numbers of {counts.what} in {counts.at} ({counts.words}), {so}; "
        f"{ranks_words(ranks)} {_now_words(view, ranks)}{while_others_wait(view, ranks)}{finished}."
    )
    ways = _ways_around(view, counts)
    accumulates = _accumulates_at(view) if counts.is_accumulation else ()
    places = ways or accumulates or view.facts[ranks[0]].steps.passes_at
    # A condition is around the pass, whose line is named; a jump has its own line.
    is_around = len(ways) == 1 and any(ways[0] in facts.steps.conditions_around for facts in view.facts.values())
    differs_at = {jump: at for facts in view.facts.values() for jump, at in facts.steps.differs_around.items()}
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if counts.are_exchanged else Confidence.POSSIBLE,
        location=(
            differs_at.get(places[0], places[0])
            if len(places) == 1 and not is_around
            else counts.skipped_at or counts.called_at
        ),
        decided_at=ways[0] if is_around else "",
        evidence=(
            Evidence(source="steps", text=f"{capitalised(counts.what)} in {counts.at}: {counts.words}."),
            *_call_evidence(counts.skipped_at, ways),
            *(
                Evidence(source="source code", text=f"What is accumulated without being reduced is decided at {at}.")
                for at in accumulates
            ),
            *how_we_know(view, ranks),
        ),
        remedy=_REMEDY_PASSES if counts.are_exchanged else _REMEDY_STEPS,
    )


def _ways_around(view: Timeline, counts: DifferentCounts) -> tuple[str, ...]:
    """The lines of the source that may have led around the skipped call, or around an optimizer's step."""
    if not counts.are_exchanged:
        return skips_steps(view)
    known = (facts.steps.led_around.get(counts.skipped_at, ()) for facts in view.facts.values())
    return next(filter(None, known), ())


def _accumulates_at(view: Timeline) -> tuple[str, ...]:
    """Where the user's code sets the number of batches over which gradients accumulate."""
    return tuple(dict.fromkeys(place for facts in view.facts.values() for place in facts.steps.accumulates_at))


def _call_evidence(skipped_at: str, ways: tuple[str, ...]) -> Iterator[Evidence]:
    if skipped_at:
        around = f"; these lines may have skipped it: {', '.join(map(short_place, ways))}" if ways else ""
        yield Evidence(source="source code", text=f"The skipped pass is called at {short_place(skipped_at)}{around}.")


def _skipped_more(view: Timeline) -> tuple[int, ...]:
    """Ranks that have skipped more backward passes than others; empty if the passes are unknown."""
    steps = {rank: facts.steps for rank, facts in sorted(view.facts.items())}
    if not steps or not all(known.with_backward for known in steps.values()):
        return ()
    # A rank that is some batches ahead may have skipped more that the others will skip, too.
    least = min(steps, key=lambda rank: (steps[rank].skipped, -steps[rank].with_backward))
    ahead = {rank: _may_be_ahead(view, rank, least) for rank in steps}
    skipped = tuple(rank for rank, known in steps.items() if known.skipped - steps[least].skipped > ahead[rank])
    # If nobody waits for gradients, another call of the batch may be awaited.
    are_awaited = all(_is_awaited_in_batch(view, rank, least) for rank in skipped)
    return skipped if are_awaited or not all(map(_reduces_nothing, steps.values())) else ()


def _reduces_nothing(steps: StepFacts) -> bool:
    """Whether no backward pass has exchanged gradients, as far back as is known."""
    # Epoch, batch, passes, those of them that reduced nothing; without zeros at the end.
    counts = [(*entry, 0, 0)[2:4] for entry in (*steps.passes, steps.under_way) if entry]
    return any(made for made, _ in counts) and all(made == kept for made, kept in counts)


def _may_be_ahead(view: Timeline, rank: int, of: int) -> int:
    """How many of the batches that one rank has skipped the other may not have reached."""
    steps, other = view.facts[rank].steps, view.facts[of].steps
    last = (steps.skipped_epoch, steps.skipped_batch)
    is_past = min(last) >= 0 and last <= (other.passes_epoch, other.passes_batch)
    if is_past or _is_awaited_in_batch(view, rank, of):
        return 0
    return max(steps.with_backward + steps.skipped - other.with_backward - other.skipped, 0)


def _is_awaited_in_batch(view: Timeline, rank: int, by: int) -> bool:
    """Whether another rank waits for this one, in the step of the very batch that this one has skipped."""
    steps, facts = view.facts[rank].steps, view.facts[by]
    is_there = (steps.skipped_epoch, steps.skipped_batch) == (facts.progress.epoch, facts.progress.batch_idx)
    call = view.activities[by].collective if by in view.waiting else None
    return (
        is_there
        and call is not None
        and is_in_action(facts.progress, ".training_step")
        and _has_left_out(view, rank, call)
    )


def _has_left_out(view: Timeline, rank: int, call: Collective) -> bool:
    """Whether a member of the call's group has not made the call, or has made another one in its place."""
    called = view.groups_by_name[call.group].enqueued.get(rank)
    if called is None or called < call.seq:
        return called is not None
    own = next((one for one in view.sequences(call.group).get(rank, ()) if one.seq == call.seq), None)
    return own is not None and (own.site, signature(own)) != (call.site, signature(call))


def _finding(view: Timeline, ranks: tuple[int, ...], confidence: Confidence) -> Finding:
    facts = view.facts[ranks[0]]
    steps = facts.steps
    batch = f"batch {steps.skipped_batch} of epoch {steps.skipped_epoch}" if steps.skipped_batch >= 0 else "a batch"
    are_alike = steps.skipped > 1 and {view.facts[rank].steps.skipped for rank in ranks} == {steps.skipped}
    batch = f"{steps.skipped} batches, the last one {batch}" if are_alike and steps.skipped_batch >= 0 else batch
    # A rank may also have raised because its connections broke later.
    error = facts.exception
    refused = error is not None and error.message.startswith(SKIPPING_REFUSED)
    raised = f", which Lightning refuses with several ranks ({error.type})" if error is not None and refused else ""
    now = "" if error is not None else f"; {verb(ranks, 'it', 'they')} {_now_words(view, ranks)}"
    text = (
        f"{clause(ranks, 'has|have skipped')} {batch}: its training_step returned without a "
        f"backward pass{_at(facts)}{raised}{now}{while_others_wait(view, ranks)}."
    )
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR if error is not None else None,
        confidence=confidence,
        location=_skipped_at(view, steps) or location_of(exception_place(facts)),
        evidence=(*_evidence(view, ranks), *how_we_know(view, ranks)),
    )


def _leading(view: Timeline, steps: StepFacts) -> list[str]:
    """The lines that may have led around the others' call: those that return nothing, if some of these do."""
    ways = {way for facts in view.facts.values() for known in facts.steps.led_around.values() for way in known}
    return [place for place in steps.returns_nothing if place in ways] or [*ways]


def _skipped_at(view: Timeline, steps: StepFacts) -> str:
    """The line that returns nothing: of several, the only one that leads around the others' call.

    If none does, it is the only line that handles what is raised on the way to that call; else the call.
    """
    leading = _leading(view, steps)
    if len(leading) == 1:
        return leading[0]
    if steps.returns_nothing:
        return steps.returns_nothing[0]
    every = [facts.steps for facts in view.facts.values()]
    handlers = {place for known in every for place in known.handlers_around}
    called = {place for known in every for made in known.passes_from for place in made if place}
    places = handlers if len(handlers) == 1 and not leading else called
    return places.pop() if len(places) == 1 else ""


def _at(facts: RankFacts) -> str:
    places = facts.steps.returns_nothing
    return f" (its only `return` without a value is {short_place(places[0])})" if len(places) == 1 else ""


def _evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    for rank in (*ranks[:LISTED], *view.besides(ranks)[:_OTHERS]):
        facts = view.facts[rank]
        steps, raised = facts.steps, facts.exception
        text = f"{steps.with_backward} batches had a backward pass, {steps.skipped} had none."
        yield Evidence(source="steps", rank=rank, text=text)
        if raised is not None and not raised.is_consequence:
            yield from exception_evidence(facts)
        if steps.skipped and steps.returns_nothing:
            text = f"Returns nothing at {', '.join(map(short_place, steps.returns_nothing[:LISTED]))}."
            yield Evidence(source="source code", rank=rank, text=text)


def _now_words(view: Timeline, ranks: tuple[int, ...]) -> str:
    """Where ranks are now, as the first of them: ``"is now in …"``, or ``"now waits in …"`` if that is what it does."""
    where = where_words(view, ranks[0])
    if ranks[0] in view.waiting:
        return f"now {verb(ranks, 'waits', 'wait')} in {wait_words(view, ranks[0])}, {where}"
    return f"{verb(ranks, 'is', 'are')} now {where}"
