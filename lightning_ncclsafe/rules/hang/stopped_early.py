"""The cause stopped-early: a rank left the training loop alone, and not because its data ended."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import LoopEnd, Phase, TrainerFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    DifferentCounts,
    Evidence,
    Finding,
    Plan,
    Severity,
    Timeline,
    aborted_by_gloo,
    batch_words,
    capitalised,
    clause,
    counted,
    different_counts,
    evidence_about,
    finding,
    had_fewer_batches,
    hang_rule,
    joined,
    out_of_data_first,
    ranks_by,
    ranks_words,
    recorder_evidence,
    skips_steps,
    verb,
    waiting_sentence,
    without_validation,
)

# Lightning's callbacks that set trainer.should_stop.
_STOPPING = frozenset({"EarlyStopping", "Timer"})
_REMEDIES = {
    LoopEnd.SHOULD_STOP: (
        "Let all ranks decide together: on every rank, outside of any condition, call "
        "stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False), and set trainer.should_stop only if "
        "the result is true."
    ),
    LoopEnd.MAX_STEPS: (
        "Look for optimizer steps that one rank makes and another skips: manual optimization under a condition, steps "
        "skipped by a gradient scaler, different accumulation. max_epochs ends all ranks after the same batch."
    ),
    LoopEnd.UNKNOWN: (
        "Look for a StopIteration that leaves training_step or a hook on this rank, for instance from next() on an "
        "iterator, and for an on_train_batch_start that returns -1: Lightning takes both for the end of the epoch. End "
        "it on all ranks, or on none."
    ),
}
_REMEDY_CALLBACK = (
    "Let all ranks decide together: log what EarlyStopping monitors with sync_dist=True. If your own code sets "
    "trainer.should_stop, call stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False) on every rank "
    "before, outside of any condition, and set it only if the result is true."
)
_REMEDY_CLOCK = (
    "Set val_check_interval to a number of batches: if it is a time, each rank decides by its own clock when to "
    "validate, and ranks do not agree on a batch."
)


_REMEDY_VALIDATION = (
    "Validate after the same batch on all ranks: look for what sets trainer.val_check_batch or val_check_interval from "
    "a rank's own values, and for a val_check_interval that is not the same on all ranks."
)
_REMEDY_WITHOUT = (
    "Validate after the same epochs on all ranks: look for what sets trainer.check_val_every_n_epoch, "
    "val_check_interval or limit_val_batches from a rank's own values, and for callbacks that are not on all ranks."
)
_REMEDY_CHANGED = "Set this to the same value on all ranks: let one rank broadcast it, or reduce it first."


@hang_rule(after="different-trainer-settings", follows=("different-trainer-settings",), plan=Plan.STOP)
def stopped_early(view: Timeline) -> Iterator[Finding]:
    """Some ranks left the training loop while others are in a batch, and the Trainer shows why.

    Symptom:
        The run hangs at a batch in the middle of an epoch; some ranks are in validation, save, or have finished.

    Cause:
        trainer.should_stop, or max_epochs, set from a rank's own values; validation by each rank's own clock, or after
        a different number of batches on some ranks; a StopIteration that leaves a hook; optimizer steps that are
        counted differently.

    Remedy:
        Decide on all ranks together when to stop and when to validate.

    Cannot see:
        Who set trainer.should_stop; loops in the user's code.
    """
    yield from [*_aborted_by_clocks(view)] or _left(view)


def _left(view: Timeline) -> Iterator[Finding]:
    early = out_of_data_first(view)
    trainers = view.trainers
    others = view.besides(early)
    if not early or trainers.keys() != view.facts.keys() or had_fewer_batches(view, early):
        return
    ends = {trainers[rank].end for rank in early}
    if validation := _validation(view, early, others, trainers):
        yield _finding(view, early, others, validation[0], Confidence.LIKELY, validation[1])
    elif ends == {LoopEnd.SHOULD_STOP} and not any(trainers[rank].end in ends for rank in others):
        how = f"stopped training: trainer.should_stop is set there, and not on {ranks_words(others)}"
        # They may have skipped the validation, after which the others would be asked to stop as well.
        is_only_sign = not without_validation(view, early, others)
        confidence = Confidence.CERTAIN if is_only_sign else Confidence.LIKELY
        remedy = _REMEDY_CALLBACK if _may_be_callback(view, early) else _REMEDIES[LoopEnd.SHOULD_STOP]
        yield _finding(view, early, others, how, confidence, remedy)
    elif changes := _changes(trainers, early, others):
        how = f"stopped training: {changes}"
        yield _finding(view, early, others, how, Confidence.LIKELY, _REMEDY_CHANGED)
    elif ends == {LoopEnd.MAX_STEPS}:
        how = "stopped training, with max_steps reached"
        counts = different_counts(view)
        counted = None if counts is None or counts.are_exchanged else counts
        yield _finding(view, early, others, how, Confidence.LIKELY, _REMEDIES[LoopEnd.MAX_STEPS], counted)
    elif (
        ends == {LoopEnd.UNKNOWN}
        and all(_is_cut_short(trainers[rank]) for rank in early)
        and not _have_begun_another_epoch(view, early, others)
    ):
        how = "left its epoch early, although neither its data nor its steps are at an end and nothing asked it to stop"
        yield _finding(view, early, others, how, Confidence.LIKELY, _REMEDIES[LoopEnd.UNKNOWN])
    elif ends == {LoopEnd.DATA} and (batches := _batches_left(view, early, others)):
        # A loader may yield fewer batches than its length.
        how = f"left an epoch of {batches} batches before its end"
        yield _finding(view, early, others, how, Confidence.POSSIBLE, _REMEDIES[LoopEnd.UNKNOWN])


def _aborted_by_clocks(view: Timeline) -> Iterator[Finding]:
    """Ranks validate by their own clocks, and gloo has aborted one in the other loop, as sizes differ there."""
    last = {rank: view.witnesses[rank].last_seen for rank in aborted_by_gloo(view)}
    gone = {rank: seen.progress for rank, seen in last.items() if seen is not None}
    trainers = view.trainers
    if not gone or trainers.keys() != view.facts.keys() or not all(one.validates_by_clock for one in trainers.values()):
        return
    progress = gone | {rank: facts.progress for rank, facts in view.facts.items()}
    early = tuple(rank for rank, now in sorted(progress.items()) if now.phase is Phase.VALIDATE)
    others = tuple(rank for rank, now in sorted(progress.items()) if now.phase is Phase.TRAIN)
    if not early or not others:
        return
    text = (
        f"{clause(early, 'has|have')} begun to validate by {verb(early, 'its', 'their')} own clock, while "
        f"{clause(others, 'is|are')} still in {batch_words(progress[others[0]])}; gloo has ended the process of "
        f"{ranks_words([*gone])}, which received what belongs to the other loop."
    )
    lines = {line for trainer in trainers.values() for line in trainer.set_at.get("val_check_interval", ())}
    yield finding(
        view,
        early,
        text,
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        location=lines.pop() if len(lines) == 1 else "",
        evidence=recorder_evidence(view),
        remedy=_REMEDY_CLOCK,
    )


def _validation(
    view: Timeline, early: tuple[int, ...], others: tuple[int, ...], trainers: dict[int, TrainerFacts]
) -> tuple[str, str] | None:
    """What the early ranks did, and the remedy, if they validate within an epoch or have not validated; else None."""
    if _have_skipped_validation(view, early, others):
        return f"continued without the validation that {clause(others, 'is|are in')}", _REMEDY_WITHOUT
    if any(view.facts[rank].progress.phase is not Phase.VALIDATE for rank in early):
        return None
    if all(trainers[rank].validates_by_clock for rank in early):
        return "begun to validate by its own clock", _REMEDY_CLOCK
    are_within = all(trainers[rank].end is LoopEnd.UNKNOWN and _is_cut_short(trainers[rank]) for rank in early)
    are_past = min(trainers[rank].batches_begun for rank in others) > max(
        trainers[rank].batches_begun for rank in early
    )
    are_alike = len({trainer.batches for trainer in trainers.values()}) == 1
    return ("begun to validate within its epoch", _REMEDY_VALIDATION) if are_within and are_past and are_alike else None


def _have_skipped_validation(view: Timeline, early: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether they have skipped it, and not because a line of the user's ended their epoch, which ends it as well.

    With NCCL, the others may be a whole epoch ahead of their devices: a rank that was asked to stop has not skipped it.
    """
    trainers = [view.trainers[rank] for rank in early]
    are_cut_short = all(one.end is LoopEnd.UNKNOWN and _is_cut_short(one) and one.ended_at for one in trainers)
    were_stopped = all(one.end is LoopEnd.SHOULD_STOP for one in trainers)
    return without_validation(view, early, others) and not are_cut_short and not were_stopped


def _batches_left(view: Timeline, early: tuple[int, ...], others: tuple[int, ...]) -> int:
    """The number of batches of the epoch that inspected ranks left early, if some are in the next epoch; else 0.

    If ranks answer themselves, it is known why an epoch ended.
    """
    now = {rank: facts.progress for rank, facts in view.facts.items()}
    counts = {view.trainers[rank].batches for rank in now}
    epochs = {now[rank].epoch for rank in others}
    are_inspected = all(facts.inspection is not None for facts in view.facts.values())
    are_training = all(each.phase is Phase.TRAIN for each in now.values())
    are_next = all({now[rank].epoch - 1} == epochs for rank in early)
    batches = counts.pop() if len(counts) == 1 else None
    is_left = batches is not None and all(now[rank].batch_idx < batches - 1 for rank in others)
    return batches if are_inspected and are_training and are_next and is_left and batches is not None else 0


def _changes(trainers: dict[int, TrainerFacts], early: tuple[int, ...], others: tuple[int, ...]) -> str:
    """What only the early ranks have changed: ``"max_epochs was changed there …, from 6 to 2"``; may be empty."""
    first = trainers[early[0]]
    if any(trainers[rank].changed != first.changed for rank in early):
        return ""
    changes = [name for name in first.changed if all(name not in trainers[rank].changed for rank in others)]
    words = (_change_words(name, first.changed[name], first.settings.get(name, "None")) for name in changes)
    return ", ".join(words)


def _change_words(name: str, now: str, before: str) -> str:
    if name == "first epoch":
        return f"its epoch counter was set there during training, as if it had begun with epoch {now}, not {before}"
    return f"{name} was changed there during training, from {before} to {now}"


def _have_begun_another_epoch(view: Timeline, early: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether they have left a validation that all others are in, so that their epoch continues."""
    phases = {rank: facts.progress.phase for rank, facts in view.facts.items()}
    is_over = all(phases[rank] is Phase.FINISHED for rank in early)
    return not is_over and all(phases[rank] is Phase.VALIDATE for rank in others)


def _is_cut_short(trainer: TrainerFacts) -> bool:
    return trainer.batches is not None and 0 < trainer.batches_begun < trainer.batches


def _finding(
    view: Timeline,
    early: tuple[int, ...],
    others: tuple[int, ...],
    how: str,
    confidence: Confidence,
    remedy: str,
    counts: DifferentCounts | None = None,
) -> Finding:
    """The finding; with ``counts``, about the ranks whose optimizer's steps were not those of the others."""
    text = (
        f"{clause(early, 'has|have')} {how}, {_at(view, early[0])}, while {ranks_words(others)} "
        f"{verb(others, 'is', 'are')} still in {batch_words(view.facts[others[0]].progress)}"
    )
    why = f"{capitalised(counts.what)} in {counts.at}: {counts.words}." if counts else ""
    places = _places(view, early, others) if counts is None else [*skips_steps(view)]
    has_finished = any(view.facts[rank].progress.phase is Phase.FINISHED for rank in early)
    return finding(
        view,
        early if counts is None else counts.ranks,
        joined((f"{text}.", why, waiting_sentence(view))),
        severity=Severity.ERROR if has_finished else None,
        confidence=confidence,
        location=places[0] if len(places) == 1 and not _may_be_callback(view, early) else "",
        evidence=(
            *_evidence(view, early, places, "ended the loop" if counts is None else "led around the optimizer's step"),
            *recorder_evidence(view),
        ),
        remedy=remedy,
    )


def _places(view: Timeline, early: tuple[int, ...], others: tuple[int, ...]) -> list[str]:
    """The lines that may have let these ranks continue."""
    if _have_skipped_validation(view, early, others):
        return [*dict.fromkeys(place for rank in early for place in view.trainers[rank].validates_at)]
    return [*dict.fromkeys(place for rank in early for place in view.trainers[rank].ended_at)]


def _may_be_callback(view: Timeline, early: tuple[int, ...]) -> bool:
    """Whether one of Lightning's own callbacks may have set should_stop."""
    trainers = (view.trainers[rank] for rank in early)
    return any(one.end is LoopEnd.SHOULD_STOP and _STOPPING.intersection(one.callbacks) for one in trainers)


def _at(view: Timeline, rank: int) -> str:
    trainer = view.trainers[rank]
    if not trainer.batches_begun:
        words = batch_words(view.facts[rank].progress)
        return f"and is {words if words.startswith(('in ', 'before ')) else f'in {words}'}"
    # Counted as Lightning does, and as the batches of other ranks are.
    of = f" (of {counted(trainer.batches, 'batch')})" if trainer.batches else ""
    return f"after batch {trainer.batches_begun - 1}{_of_epoch(view, rank)}{of}"


def _of_epoch(view: Timeline, rank: int) -> str:
    """``" of epoch 1"``: a rank that has finished may have left more epochs than the one that the others are in."""
    progress = view.facts[rank].progress
    last = progress.epoch - 1
    is_other = progress.phase is Phase.FINISHED and last > min(facts.progress.epoch for facts in view.facts.values())
    return f" of epoch {last}" if is_other else ""


def _evidence(view: Timeline, early: tuple[int, ...], places: list[str], did: str) -> Iterator[Evidence]:
    seen: dict[int, str] = {}
    for rank in sorted(view.facts, key=lambda rank: rank not in early):
        trainer = view.trainers[rank]
        stopping = sorted(_STOPPING.intersection(trainer.callbacks))
        can = f"; its {' and '.join(stopping)} can stop it" if stopping else ""
        progress = view.facts[rank].progress
        where = "finished" if progress.phase is Phase.FINISHED else batch_words(progress)
        seen[rank] = f"{where}, {_at(view, rank)}{can}"
    for place in places:
        yield Evidence(source="source code", text=f"{place} may have {did}.")
    for words, ranks in list(ranks_by(seen).items())[:16]:
        text = f"{capitalised(ranks_words(ranks))}: {words}."
        yield evidence_about(ranks, "trainer", text)
