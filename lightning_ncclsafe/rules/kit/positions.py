"""How far each rank has come through its data, compared between ranks."""

from collections.abc import Iterable
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import END_OF_EPOCH
from lightning_ncclsafe.facts import Phase, Progress, RankFacts
from lightning_ncclsafe.rules.kit.activity import hook_words
from lightning_ncclsafe.rules.kit.divergences import alone_in_trainer, conditioned, in_trainer_again
from lightning_ncclsafe.rules.kit.sharded import gathering_alone
from lightning_ncclsafe.rules.kit.timeline import Timeline

_LOOPS = (Phase.TRAIN, Phase.VALIDATE, Phase.TEST, Phase.PREDICT)
_IN_BATCH = ("_step", "backward", "forward", "on_train_batch_start", "on_before_zero_grad", "on_after_backward")
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
    is_past = _past_last_batch(progress) or (stage == 0 and _ends_epoch(facts))
    return Position(progress.epoch, stage + is_past, progress.batch_idx)


def _ends_epoch(facts: RankFacts) -> bool:
    """Whether a rank is in what Lightning does between its training epochs."""
    return any(END_OF_EPOCH.has(frame.file, frame.function) for frame in facts.stack)


def _past_last_batch(progress: Progress) -> bool:
    hooks = [hook_words(action.name) for action in progress.actions]
    # Of data of unknown length nobody knows before that a batch is the last one.
    is_past = any(hook.endswith(_PAST_BATCHES) for hook in hooks)
    return is_past or (progress.is_last_batch and not any(hook.endswith(_IN_BATCH) for hook in hooks))


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
    # Somebody must still be in batches. Within one epoch's, a rank that is a batch ahead has skipped a collective.
    if first == last or first[1] not in (0, 2):
        return _an_epoch_ahead(view, first[0])
    ended = tuple(rank for rank, place in places.items() if place != first)
    still = tuple(rank for rank, place in places.items() if place == first)
    # Who waits in its batch under a condition on the rank does not wait for the end of anybody's data.
    is_alone = not conditioned(view, view.facts).keys().isdisjoint(still)
    return () if is_alone or _equally_many(view, ended, still) else ended


def _is_explained(view: Timeline) -> bool:
    working = view.working(view.facts)
    # For a rank that has left nobody waits; those that go on will do so in vain.
    is_left = any(facts.progress.phase is Phase.FINISHED for facts in view.facts.values()) and not view.waiting
    is_at_work = bool(working) and not (is_left and in_its_data(view, working))
    is_alone = bool(gathering_alone(view)) or any(alone_in_trainer(view)) or bool(in_trainer_again(view))
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


def _is_of_known_length(facts: RankFacts) -> bool:
    of_epoch = facts.trainer.batches if facts.trainer is not None else None
    return of_epoch is not None or any(loader.batches is not None for loader in facts.loaders[:1])


def _all_joined(view: Timeline) -> bool:
    held = [group for group in view.groups if group.seq is not None]
    return bool(held) and all(view.joined(group) for group in held)
