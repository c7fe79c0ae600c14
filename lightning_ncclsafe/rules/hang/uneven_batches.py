"""The cause uneven-batches: ranks have different numbers of batches."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import Phase
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    LeftLoop,
    Plan,
    Severity,
    Timeline,
    batch_words,
    batches_through_epoch,
    capitalised,
    clause,
    evidence_about,
    finding,
    had_fewer_batches,
    hang_rule,
    joined,
    left_loop,
    location_of,
    others_wait,
    out_of_data_first,
    positions,
    ranks_by,
    ranks_words,
    recorder_evidence,
    short_place,
    user_location,
    verb,
    waiting_sentence,
    where_evidence,
)

_TRAINING = (Phase.TRAIN, Phase.CHECKPOINT, Phase.FINISHED)
_REMEDY = (
    "Give every rank the same number of batches: seed every random split alike on all ranks (seed_everything), pack or "
    "filter before sharding, pad or cut the shards of an IterableDataset to one length, and keep "
    "use_distributed_sampler=True where a sampler can be injected. Compare len(dataloader) on all ranks after all "
    "wrapping, not len(dataset)."
)
_REMEDY_STOPPED = (
    "Its loader has as many batches as those of the others: look for what has ended the Trainer on this rank alone, "
    "trainer.should_stop set from the rank's own values (reduce them first), or a different max_time, max_epochs "
    "or limit_train_batches. If there is none, the loader yields fewer batches than its length."
)
# Calls of the Trainer that are no training.
_CALLS = {Phase.TEST: "test", Phase.PREDICT: "prediction"}


@hang_rule(
    after="stopped-early",
    follows=(
        "different-trainer-settings",
        "stopped-early",
        "diverged-collectives",
        "skipped-step",
        "unused-parameters",
    ),
    plan=Plan.STOP,
)
def uneven_batches(view: Timeline) -> Iterator[Finding]:
    """Some ranks have reached the end of their data while others are still in a batch.

    Symptom:
        The run hangs or breaks at the end of an epoch or "when saving"; every rank is in a collective, or has finished.

    Cause:
        Splits without a common seed, packing or filtering after sharding, uneven shards of an IterableDataset.

    Remedy:
        Give every rank the same number of batches.

    Cannot see:
        How many batches a loader without a length has; then only the position of each rank is known.
    """
    if short := out_of_data_first(view):
        yield _finding(view, short)
    elif left := left_loop(view):
        yield _loop_finding(view, left)


def _finding(view: Timeline, short: tuple[int, ...]) -> Finding:
    others = view.besides(short)
    lengths = _lengths(view)
    is_stopped = _is_stopped(view, short)
    is_inspected = any(facts.inspection is not None for facts in view.facts.values())
    is_certain = _have_fewer(view, short) if is_inspected else len(set(lengths.values())) > 1
    confidence = Confidence.CERTAIN if is_certain else Confidence.LIKELY
    is_known = all(_is_known(view, rank) for rank in short)
    stage = _CALLS.get(view.facts[others[0]].progress.phase, "training")
    how = "run out of data" if is_known and not is_stopped else f"ended {verb(short, 'its', 'their')} {stage}"
    where = batch_words(view.facts[others[0]].progress)
    ended = _ended(view, short)
    text = (
        f"{clause(short, 'has|have')} {how}{f' ({ended})' if ended else ''} while "
        f"{clause(others, 'is|are still')} {where if where.startswith('in ') else f'in {where}'}"
    )
    place = "" if is_stopped else _ends_at(view, short, others)
    made = f"How much data they have is decided at {short_place(place)}." if place else ""
    return finding(
        view,
        short,
        joined((f"{text}.", waiting_sentence(view), made)),
        severity=_severity(view, short),
        confidence=confidence if is_known and _is_decided(view, short) else Confidence.POSSIBLE,
        location=place or user_location(view, others),
        evidence=(*_evidence(view), *_line_evidence(place), *recorder_evidence(view)),
        remedy=_REMEDY_STOPPED if is_stopped else _REMEDY,
    )


def _ends_at(view: Timeline, short: tuple[int, ...], others: tuple[int, ...]) -> str:
    """The line that decides how much data the short ranks have for what the others are in; empty if unknown."""
    if _batches_differ(view):
        return ""
    phases = {view.facts[rank].progress.phase for rank in others}
    if had_fewer_batches(view, short):
        phases = {Phase.TRAIN}
    lines = {view.facts[rank].data_ends_at.get(phase.value, "") for rank in short for phase in phases}
    return lines.pop() if len(lines) == 1 else ""


def _batches_differ(view: Timeline) -> bool:
    """Whether the training loaders of ranks make batches of different sizes: then their data may be equally long."""
    training = [facts.loaders for facts in view.facts.values() if facts.progress.phase in _TRAINING]
    sizes = {(one.batch_size, one.drop_last) for loaders in training for one in loaders[:1] if one.batch_size}
    return len(sizes) > 1


def _line_evidence(place: str) -> Iterator[Evidence]:
    if place:
        yield Evidence(source="source code", text=f"How much data they have is decided at {place}.")


def _loop_finding(view: Timeline, left: LeftLoop) -> Finding:
    """Without a Trainer no batches are counted; the source shows the loop that ranks are in."""
    others = view.besides(left.ranks)
    loop, where = f"`{left.loop.code}` (line {left.loop.line})", f"{location_of(left.loop)}."
    text = (
        f"{clause(left.ranks, 'has|have left')} the loop {loop} in which {clause(others, 'is|are still')}: "
        f"{verb(left.ranks, 'it', 'they')} had fewer batches, or something else has ended the loop there. "
        f"{capitalised(others_wait(view))}."
    )
    return finding(
        view,
        left.ranks,
        text,
        confidence=Confidence.POSSIBLE,
        location=location_of(left.loop),
        evidence=(
            Evidence(source="source code", text=f"The loop that {clause(others, 'is|are')} in: {where}"),
            *where_evidence(view, view.facts),
        ),
        remedy=_REMEDY,
    )


def _is_decided(view: Timeline, short: tuple[int, ...]) -> bool:
    """Whether these ranks have too few batches, and not the others too many.

    For inspected ranks, only the minority decides: others that are still in validation may have skipped something else,
    and if all epochs are equally long, something else may have ended one.
    """
    if all(facts.inspection is None for facts in view.facts.values()):
        return True
    if _have_fewer(view, short):
        return True
    others = {view.facts[rank].progress.phase for rank in view.facts if rank not in short}
    counts = {facts.trainer.batches if facts.trainer is not None else None for facts in view.facts.values()}
    return 2 * len(short) < len(view.facts) and Phase.VALIDATE not in others and (len(counts) > 1 or None in counts)


def _have_fewer(view: Timeline, short: tuple[int, ...]) -> bool:
    """Whether the others are in batches that these ranks do not have, by the numbers of batches of all ranks."""
    lengths = _lengths(view)
    if lengths.keys() != view.facts.keys():
        return False
    most = max(map(lengths.__getitem__, short))
    return all(facts.progress.batch_idx >= most for rank, facts in view.facts.items() if rank not in short)


def _is_known(view: Timeline, rank: int) -> bool:
    """Whether anything is known about its batches."""
    facts = view.facts[rank]
    is_placed = facts.progress.batch_idx >= 0 and facts.progress.epoch >= 0
    return is_placed or facts.trainer is not None or rank in _lengths(view)


def _is_stopped(view: Timeline, short: tuple[int, ...]) -> bool:
    """Whether all loaders have equally many batches, so that something else ended the Trainer on these ranks."""
    lengths = _lengths(view)
    have_finished = all(view.facts[rank].progress.phase is Phase.FINISHED for rank in short)
    return have_finished and lengths.keys() == view.facts.keys() and len({*lengths.values()}) == 1


def _severity(view: Timeline, short: tuple[int, ...]) -> Severity | None:
    """An error if a rank has finished: it will make no more calls, and the others wait in vain."""
    is_final = any(view.facts[rank].progress.phase is Phase.FINISHED for rank in short)
    return Severity.ERROR if is_final else None


def _ended(view: Timeline, short: tuple[int, ...]) -> str:
    """``"after 20 batches of epoch 3"``, by the first rank; empty if it has finished and its batches are not known."""
    rank, progress = short[0], view.facts[short[0]].progress
    is_counted = progress.is_last_batch or progress.phase is Phase.FINISHED
    is_in_another = progress.epoch > min(facts.progress.epoch for facts in view.facts.values())
    if had_fewer_batches(view, short):
        counts = batches_through_epoch(view)
        most = max(counts.values())
        return f"after {counts[rank]} batches by the end of epoch {progress.epoch - 1}; others had {most}"
    # It has less of the validation that others are in: its batches of training say nothing about that.
    others = {facts.progress.phase for other, facts in view.facts.items() if other not in short}
    is_past_validation = progress.phase is Phase.TRAIN and Phase.VALIDATE in others
    if progress.phase not in _TRAINING or is_past_validation or (is_in_another and not is_counted):
        return f"it is{'' if progress.is_between_epochs else ' at'} {batch_words(progress)}"
    # A loader may yield fewer batches than its length.
    count = _lengths(view).get(rank, progress.batch_idx + 1) if is_counted else progress.batch_idx + 1
    of_epoch = f" of epoch {progress.epoch}" if progress.epoch >= 0 else ""
    if count <= 0:
        return "" if progress.phase is Phase.FINISHED else batch_words(progress)
    return f"after {count} batches{of_epoch}"


def _lengths(view: Timeline) -> dict[int, int]:
    """The number of batches of each rank's first loader, if it has a length and is the one for training.

    For inspected ranks, the number that the Trainer expects.
    """
    if any(facts.inspection is not None for facts in view.facts.values()):
        trainers = ((facts.rank, facts.trainer) for facts in view.facts.values())
        return {rank: trainer.batches for rank, trainer in trainers if trainer is not None and trainer.batches}
    training = [facts for facts in view.facts.values() if facts.loaders and facts.progress.phase in _TRAINING]
    first = {facts.rank: facts.loaders[0].batches for facts in training}
    return {rank: batches for rank, batches in first.items() if batches is not None}


def _evidence(view: Timeline) -> Iterator[Evidence]:
    lengths = _lengths(view)
    alike = ranks_by({rank: (position, lengths.get(rank)) for rank, position in positions(view).items()})
    for (position, length), ranks in sorted(alike.items(), key=lambda item: item[1])[:16]:
        has = f"; its loader has {length} batches" if length is not None else ""
        progress = view.facts[ranks[0]].progress
        text = f"{capitalised(ranks_words(ranks))}: {batch_words(progress)}{has}."
        last = " This was its last batch." if position.is_past_training and not progress.is_between_epochs else ""
        yield evidence_about(ranks, "phase", text + last)
