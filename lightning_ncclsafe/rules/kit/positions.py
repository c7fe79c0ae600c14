"""How far each rank has come through its data, compared between ranks."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import BACKWARD, BATCH, DDP, EARLY_STOPPING, END_OF_EPOCH, FSDP, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Frame, LoggedKey, Phase, Progress, RankFacts
from lightning_ncclsafe.rules.kit.activity import hook_words, is_in
from lightning_ncclsafe.rules.kit.alone import alone_in_trainer, gathering_alone, in_trainer_again
from lightning_ncclsafe.rules.kit.apart import conditioned, waits_apart
from lightning_ncclsafe.rules.kit.lines import in_own_call
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline

_EXCHANGE_OF_GRADIENTS = BACKWARD | DDP | FSDP
_LOOPS = (Phase.TRAIN, Phase.VALIDATE, Phase.TEST, Phase.PREDICT)
_IN_BATCH = ("_step", "backward", "forward", "on_train_batch_start", "on_before_zero_grad", "on_after_backward")
# Callbacks that look at a value which is to be logged.
_MONITORS = EARLY_STOPPING | MODEL_CHECKPOINT
_PAST_BATCHES = tuple(f"on_{loop}_epoch_end" for loop in ("train", "validation", "test", "predict"))


class Position(NamedTuple):
    """A rank's place in the run; the later in the run, the greater.

    Attributes:
        epoch: Current epoch.
        stage: 0 in training (or test) batches, 1 past the last one, 2 in validation batches, 3 past the last one of
            these, 4 finished; -1 before training.
        batch: Index of the batch.
    """

    epoch: float
    stage: int
    batch: int


@once
def positions(view: Timeline) -> dict[int, Position]:
    """Where each answering rank stands in its data."""
    return {rank: _position(facts) for rank, facts in sorted(view.facts.items())}


def begins(progress: Progress) -> bool:
    """Whether a rank has not come to the first batch yet; it may have fetched data, or made its loaders."""
    if progress.phase is Phase.TRAIN:
        is_known = bool(progress.actions or progress.last_action)
        return is_known and progress.batch_idx < 0 and progress.epoch == 0 and progress.global_step == 0
    return progress.phase is Phase.INIT


def in_its_data(view: Timeline, ranks: Iterable[int]) -> bool:
    """Whether one of these ranks stands in a batch that is not its last, or in its loader for the next one."""
    progresses = (view.facts[rank].progress for rank in ranks)
    return any(now.phase in _LOOPS and not _past_last_batch(now) and _is_in_loop(now) for now in progresses)


def _is_in_loop(progress: Progress) -> bool:
    return any(hook_words(action.name).endswith((*_IN_BATCH, "_dataloader_next")) for action in progress.actions)


def _position(facts: RankFacts) -> Position:
    progress = facts.progress
    if progress.phase is Phase.FINISHED:
        return Position(float("inf"), 4, progress.batch_idx)
    if progress.phase in (Phase.INIT, Phase.SANITY_CHECK):
        return Position(-1, -1, progress.batch_idx)
    stage = 2 if progress.phase is Phase.VALIDATE else 0
    # Its last batch may have been no last one of its data: a StopIteration ends an epoch, too.
    is_past = (_past_last_batch(progress) and not _raised_in_batch(facts)) or (stage == 0 and _ends_epoch(facts))
    return Position(progress.epoch, stage + is_past, progress.batch_idx)


def _raised_in_batch(facts: RankFacts) -> bool:
    """Whether an exception has taken a rank out of its batch: it has left all actions since, and not its data."""
    return facts.exception is not None and is_in(BATCH, facts.exception.stack)


def _ends_epoch(facts: RankFacts) -> bool:
    """Whether a rank is in what Lightning does between its training epochs."""
    return is_in(END_OF_EPOCH, facts.stack)


def _past_last_batch(progress: Progress) -> bool:
    hooks = [hook_words(action.name) for action in progress.actions]
    # Of data of unknown length nobody knows before that a batch is the last one.
    is_past = any(hook.endswith(_PAST_BATCHES) for hook in hooks)
    return is_past or (progress.is_last_batch and not any(hook.endswith(_IN_BATCH) for hook in hooks))


@once
def ended_first(view: Timeline) -> tuple[int, ...]:
    """Ranks that ran out of data before others did, ascending; empty where that does not explain why ranks wait.

    A rank that works (in user code, the loader, a logger) explains the wait by itself, as does one that runs a spread
    model alone or is in a call of the Trainer that the others have not made, and ranks that all have joined one
    collective do not wait for the end of anybody's data.
    """
    if len(view.facts) < 2 or view.raised or _is_explained(view):
        return ()
    places = {rank: (place.epoch, place.stage) for rank, place in positions(view).items()}
    first, last = min(places.values()), max(places.values())
    ended = tuple(rank for rank, place in places.items() if place != first)
    still = tuple(rank for rank, place in places.items() if place == first)
    # Somebody must still be in batches. Within one epoch's, a rank that is a batch ahead has skipped a collective.
    if first == last or (first[1] not in (0, 2) and not without_validation(view, ended, still)):
        return _an_epoch_ahead(view, first[0])
    # Who waits in its batch under a condition on the rank does not wait for the end of anybody's data.
    is_alone = not conditioned(view, view.facts).keys().isdisjoint(still)
    is_even = _equally_many(view, ended, still) or _validated_all(view, ended, still)
    return () if is_alone or is_even or _may_be_left_behind(view, ended, still) else ended


class LeftLoop(NamedTuple):
    """Ranks that are past a loop of the user's in which the others still train.

    Attributes:
        ranks: These ranks, ascending.
        loop: The loop's first line.
    """

    ranks: tuple[int, ...]
    loop: Frame


@once
def left_loop(view: Timeline) -> LeftLoop | None:
    """Who has left the loop that the others are in, of ranks without a Trainer that are seen from outside."""
    apart = waits_apart(view)
    if apart is None or apart.why or any(facts.progress.phase is not Phase.UNKNOWN for facts in view.facts.values()):
        return None
    still = [rank for rank in view.waiting if is_in(_EXCHANGE_OF_GRADIENTS, view.facts[rank].stack)]
    past = tuple(rank for rank in view.waiting if rank not in still)
    loops = {_loop_left(view.facts[one].stack, view.facts[other].stack) for one in past for other in still}
    loop = loops.pop() if len(loops) == 1 else None
    return LeftLoop(past, loop) if loop is not None else None


def _loop_left(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> Frame | None:
    """The outermost loop that one stack is past, further down in the same function, and another is in."""
    for depth, (own, others) in enumerate(zip(one, other, strict=False)):
        if (own.file, own.function) != (others.file, others.function):
            return None
        if own.line != others.line:
            inside = (frame for frame in other[depth:] if frame.user and frame.loop and frame.loop != own.loop)
            return next(map(_first_line, inside), None) if own.user and own.line > others.line else None
    return None


def _first_line(frame: Frame) -> Frame:
    code, _, line = frame.loop.rpartition("  (line ")
    return replace(frame, line=int(line.rstrip(")")), code=code)


def _may_be_left_behind(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether those past their batches may be an epoch behind the others, which have left out a call of the user's.

    Epochs are not seen from outside. Who is past its first batch has not begun an epoch that the others have not.
    """
    are_seen = waits_apart(view) is not None
    is_early = all(view.facts[rank].progress.batch_idx < 1 for rank in still)
    # Not all need have this callback, or the value that it looks at.
    return are_seen and is_early and all(in_own_call(view, rank) or _votes_on_stopping(view, rank) for rank in ended)


def _votes_on_stopping(view: Timeline, rank: int) -> bool:
    return is_in(EARLY_STOPPING, view.facts[rank].stack)


def _is_explained(view: Timeline) -> bool:
    working = view.working(view.facts)
    # For a rank that has left nobody waits; those that go on will do so in vain.
    is_left = any(facts.progress.phase is Phase.FINISHED for facts in view.facts.values()) and not view.waiting
    is_at_work = bool(working) and not (is_left and in_its_data(view, working))
    is_alone = bool(gathering_alone(view) or alone_in_trainer(view) or in_trainer_again(view))
    return is_at_work or _all_joined(view) or is_alone


def _an_epoch_ahead(view: Timeline, first: float) -> tuple[int, ...]:
    """Ranks that have finished all epochs while others, between batches, have more than one left to begin."""
    places = ((rank, facts.progress) for rank, facts in sorted(view.facts.items()))
    # When they have finished, Lightning counts one epoch more than it does in the last one.
    return tuple(rank for rank, now in places if now.phase is Phase.FINISHED and now.epoch > first + 1)


def _equally_many(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """All have come to one batch, the last one of all as far as is known: they differ in what they do."""
    loops = {view.facts[rank].progress.phase for rank in still}
    facts = [view.facts[rank] for rank in (*ended, *still)]
    # Who has gone on from validation to the next epoch tells no more how many batches it had there.
    if Phase.VALIDATE in loops:
        facts = [each for each in facts if each.progress.phase is Phase.VALIDATE]
    both = [each.progress for each in facts]
    is_one_loop = len({now.phase is Phase.VALIDATE for now in both}) == 1 and len(facts) > len(still)
    may_be_last = all(now.is_last_batch for now in both) or not any(map(_is_of_known_length, facts))
    is_one_batch = len({(now.epoch, now.batch_idx) for now in both}) == 1 and both[0].batch_idx >= 0
    return is_one_loop and may_be_last and is_one_batch


def _validated_all(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether those that have gone on from validation have made as many batches there as the others are to make."""
    if any(view.facts[rank].progress.phase is not Phase.VALIDATE for rank in still):
        return False
    if without_validation(view, ended, still):
        return False
    gone_on = [facts.trainer for rank in ended if (facts := view.facts[rank]).progress.phase is not Phase.VALIDATE]
    made = {trainer.validated if trainer is not None else None for trainer in gone_on}
    to_make = {_batches(view.facts[rank]) for rank in still}
    return len(gone_on) == len(ended) and None not in to_make and made == to_make


def without_validation(view: Timeline, gone_on: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether those that have gone on have left out the whole validation that the others are in."""
    validating = {rank for rank, facts in view.facts.items() if facts.progress.phase is Phase.VALIDATE}
    trainers = {rank: view.facts[rank].trainer for rank in still}
    if validating != {*still} or not gone_on:
        return False
    made = {view.facts[rank].steps.validated for rank in gone_on}
    # Those of the validation that they are in; the batch that a rank is in need not count as made.
    now = {(view.facts[rank].steps.validated, one.validated) for rank, one in trainers.items() if one is not None}
    more = [(begun - before, over) for begun, over in now for before in made]
    return None not in trainers.values() and all(max(over, 1) <= count <= over + 1 for count, over in more)


def _batches(facts: RankFacts) -> int | None:
    """Of all loaders of its loop; None where one of them has no length."""
    counts = [loader.batches for loader in facts.loaders]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _is_of_known_length(facts: RankFacts) -> bool:
    of_epoch = facts.trainer.batches if facts.trainer is not None else None
    return of_epoch is not None or any(loader.batches is not None for loader in facts.loaders[:1])


def _all_joined(view: Timeline) -> bool:
    held = [group for group in view.groups if group.seq is not None]
    return bool(held) and all(view.joined(group) for group in held)


def monitored_apart(view: Timeline) -> tuple[LoggedKey, tuple[int, ...], tuple[int, ...]] | None:
    """A key at which a callback looks in which some ranks wait; those, and the others, which have not logged it.

    None if there is no such key, or if a rank is at work or has raised.
    """
    inside = {rank for rank in view.waiting if is_in(_MONITORS, view.facts[rank].stack)}
    outside = view.facts.keys() - inside
    if not inside or not outside or view.raised or view.working(view.facts) or ended_first(view):
        return None
    logged = {rank: {key.name for key in facts.steps.monitored} for rank, facts in view.facts.items()}
    common = set.intersection(*(logged[rank] for rank in inside))
    keys = (key for key in view.facts[min(inside)].steps.monitored if key.name in common)
    key = next((key for key in keys if all(key.name not in logged[rank] for rank in outside)), None)
    return (key, tuple(sorted(inside)), tuple(sorted(outside))) if key is not None else None
