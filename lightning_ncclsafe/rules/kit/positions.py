"""How far each rank is in its data, compared between ranks: which ran out of data first, and which left a loop."""

from collections.abc import Iterable
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import BACKWARD, BATCH, DDP, EARLY_STOPPING, END_OF_EPOCH, FSDP
from lightning_ncclsafe.facts import Frame, LoopEnd, Phase, Progress, RankFacts
from lightning_ncclsafe.facts.phase_kinds import stage_fetched
from lightning_ncclsafe.rules.kit.activity import hook_words
from lightning_ncclsafe.rules.kit.alone import alone_in_trainer, gathering_alone, in_trainer_again
from lightning_ncclsafe.rules.kit.frames import is_in, loop_left
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.user_lines import in_own_call
from lightning_ncclsafe.rules.kit.waits import different_waits, under_rank_condition

_EXCHANGE_OF_GRADIENTS = BACKWARD | DDP | FSDP
_PAST_TRAINING, _PAST_VALIDATION, _END_OF_EPOCH, _FINISHED = 1, 3, 4, 5
_LOOPS = (Phase.TRAIN, Phase.VALIDATE, Phase.TEST, Phase.PREDICT)
_VALIDATIONS = (Phase.SANITY_CHECK, Phase.VALIDATE)
_IN_BATCH = ("_step", "backward", "forward", "on_train_batch_start", "on_before_zero_grad", "on_after_backward")
_PAST_BATCHES = tuple(f"on_{loop}_epoch_end" for loop in ("train", "validation", "test", "predict"))


class Position(NamedTuple):
    """A rank's position in the run; later positions compare greater.

    Attributes:
        epoch: Current epoch; -1 before training, for which the sanity check is a validation.
        stage: 0 in training (or test) batches, 1 past the last one, 2 in validation batches, 3 past the last one of
            these, 4 at the end of the epoch, 5 finished; -1 before the first batch of any.
        batch: Index of the batch.
    """

    epoch: float
    stage: int
    batch: int

    @property
    def is_past_training(self) -> bool:
        """Whether the batch is the last one of an epoch's training."""
        return self.stage in (_PAST_TRAINING, _END_OF_EPOCH)


@once
def positions(view: Timeline) -> dict[int, Position]:
    """The position of each answering rank in its data."""
    return {rank: _position(facts) for rank, facts in sorted(view.facts.items())}


def is_before_first_batch(progress: Progress) -> bool:
    """Whether a rank has not reached its first batch; it may have created its loaders and fetched data."""
    if progress.phase is Phase.TRAIN:
        is_known = bool(progress.actions or progress.last_action)
        return is_known and progress.batch_idx < 0 and progress.epoch == 0 and progress.global_step == 0
    return progress.phase is Phase.INIT


def has_batches_left(view: Timeline, ranks: Iterable[int]) -> bool:
    """Whether one of these ranks is in a batch that is not its last, or fetches the next one."""
    progresses = (view.facts[rank].progress for rank in ranks)
    return any(now.phase in _LOOPS and not _past_last_batch(now) and _is_in_loop(now) for now in progresses)


def _is_in_loop(progress: Progress) -> bool:
    names = [action.name for action in progress.actions]
    return any(hook_words(name).endswith(_IN_BATCH) or stage_fetched(name) for name in names)


def _position(facts: RankFacts) -> Position:
    progress = facts.progress
    if progress.phase is Phase.FINISHED:
        return Position(float("inf"), _FINISHED, progress.batch_idx)
    if progress.phase is Phase.INIT:
        return Position(-1, -1, progress.batch_idx)
    stage = 2 if progress.phase in _VALIDATIONS else 0
    # This may not have been the last batch of its data: a StopIteration ends an epoch, too.
    is_past = _past_last_batch(progress) and not _raised_in_batch(facts)
    if stage == 0 and _ends_epoch(facts):
        # It follows the epoch's validation.
        return Position(progress.epoch, _END_OF_EPOCH, progress.batch_idx)
    epoch = -1 if progress.phase is Phase.SANITY_CHECK else progress.epoch
    return Position(epoch, stage + is_past, progress.batch_idx)


def _ends_epoch(facts: RankFacts) -> bool:
    """Whether a rank is in a hook at the end of a training epoch, or reduces its metrics, which no hook shows."""
    hooks = (hook_words(action.name) for action in facts.progress.actions)
    return is_in(END_OF_EPOCH, facts.stack) or any(hook.endswith("on_train_epoch_end") for hook in hooks)


def _raised_in_batch(facts: RankFacts) -> bool:
    """Whether an exception was raised within a batch: the rank has left all actions since, but not its data."""
    return facts.exception is not None and is_in(BATCH, facts.exception.stack)


def _past_last_batch(progress: Progress) -> bool:
    hooks = [hook_words(action.name) for action in progress.actions]
    # If the length of the data is unknown, nobody knows in advance that a batch is the last one.
    is_past = any(hook.endswith(_PAST_BATCHES) for hook in hooks)
    return is_past or (progress.is_last_batch and not any(hook.endswith(_IN_BATCH) for hook in hooks))


@once
def out_of_data_first(view: Timeline) -> tuple[int, ...]:
    """Ranks that ran out of data before others did, ascending; empty if that does not explain why ranks wait.

    A rank that works (in user code, the loader, a logger) explains the wait by itself, as does one that runs a sharded
    model alone or is in a call of the Trainer that the others have not made. Ranks that have all joined one collective
    do not wait because of data.
    """
    if len(view.facts) < 2 or view.raised or _is_explained(view):
        return ()
    places = {rank: (place.epoch, place.stage) for rank, place in positions(view).items()}
    first, last = min(places.values()), max(places.values())
    ended = tuple(rank for rank, place in places.items() if place != first)
    still = tuple(rank for rank, place in places.items() if place == first)
    if _validates_before(view, ended, still):
        return () if _validated_it(view, still, ended) else still
    # Some rank must still be in batches. A rank that is a batch ahead in the same epoch has skipped a collective.
    if first[1] == _PAST_VALIDATION and _validated_less(view, ended, still):
        return ended
    if first == last or (first[1] not in (0, 2) and not without_validation(view, ended, still)):
        return _an_epoch_ahead(view, first[0])
    # A rank that waits in its batch under a condition on the rank does not wait because of data.
    is_alone = not under_rank_condition(view, view.facts).keys().isdisjoint(still)
    is_even = (
        _equally_many(view, ended, still)
        or _validated_it(view, ended, still)
        or _before_batches(view, still)
        or finished_ahead(view) is not None
        or not _went_through_sanity_check(view, ended)
    )
    return () if is_alone or is_even or _may_be_left_behind(view, ended, still) else ended


class FinishedAhead(NamedTuple):
    """Ranks that have trained on all of their batches, and others that wait in one of theirs: all have equally many.

    Attributes:
        ranks: The ranks that have finished, ascending.
        still: The others, ascending.
        batches: The number of batches of an epoch.
    """

    ranks: tuple[int, ...]
    still: tuple[int, ...]
    batches: int

    @property
    def odd(self) -> tuple[int, ...]:
        """The minority; all of them if there is none."""
        if len(self.ranks) == len(self.still):
            return tuple(sorted((*self.ranks, *self.still)))
        return min(self.ranks, self.still, key=len)


@once
def finished_ahead(view: Timeline) -> FinishedAhead | None:
    """Ranks that have finished before others although data, settings and passes per batch are alike; None if none have.

    In some batch they have skipped calls, or the others have made extra ones, and these were paired with other calls of
    the same kind.
    """
    trainers = [*view.trainers.values()]
    ranks = tuple(rank for rank, facts in sorted(view.facts.items()) if facts.progress.phase is Phase.FINISHED)
    still = tuple(sorted(view.facts.keys() - {*ranks}))
    if not ranks or not still or len(trainers) < len(view.facts) or view.silent or not set(view.waiting) >= set(still):
        return None
    ends = {(one.batches, tuple(sorted(one.settings.items())), tuple(sorted(one.changed.items()))) for one in trainers}
    batches = trainers[0].batches
    if len(ends) > 1 or not batches or not trainers[0].settings:
        return None
    have_ended = all(
        one.end is LoopEnd.DATA and one.batches_begun == batches for one in map(view.trainers.__getitem__, ranks)
    )
    places = [view.facts[rank].progress for rank in still]
    in_batch = all(now.phase is Phase.TRAIN and _is_in_loop(now) and 0 <= now.batch_idx < batches for now in places)
    # In an earlier epoch, or in another call of the Trainer, they would be further behind than some calls explain.
    ended_in = {view.facts[rank].progress.epoch for rank in ranks}
    in_batch = in_batch and all(now.epoch + 1 in ended_in for now in places)
    return FinishedAhead(ranks, still, batches) if have_ended and in_batch else None


class LeftLoop(NamedTuple):
    """Ranks that are past a loop in which the others still train.

    Attributes:
        ranks: These ranks, ascending.
        loop: The loop's first line.
    """

    ranks: tuple[int, ...]
    loop: Frame


@once
def left_loop(view: Timeline) -> LeftLoop | None:
    """Which of inspected ranks without a Trainer have left the loop that the others are in; None if unknown."""
    waits = different_waits(view)
    if waits is None or waits.why or any(facts.progress.phase is not Phase.UNKNOWN for facts in view.facts.values()):
        return None
    still = [rank for rank in view.waiting if is_in(_EXCHANGE_OF_GRADIENTS, view.facts[rank].stack)]
    past = tuple(rank for rank in view.waiting if rank not in still)
    loops = {loop_left(view.facts[one].stack, view.facts[other].stack) for one in past for other in still}
    loop = loops.pop() if len(loops) == 1 else None
    return LeftLoop(past, loop) if loop is not None else None


def _may_be_left_behind(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether the ranks past their batches may be an epoch behind the others, which have skipped a call of the user's.

    An inspection does not see epochs. A rank past its first batch has not just begun an epoch.
    """
    are_seen = different_waits(view) is not None
    is_early = all(view.facts[rank].progress.batch_idx < 1 for rank in still)
    # Not every rank needs to have EarlyStopping, or the value that it monitors.
    in_vote = {rank for rank in ended if is_in(EARLY_STOPPING, view.facts[rank].stack)}
    return are_seen and is_early and all(rank in in_vote or in_own_call(view, rank) for rank in ended)


def _is_explained(view: Timeline) -> bool:
    working = view.working(view.facts)
    # No rank waits for one that has finished yet; those that continue will wait in vain.
    has_left = any(facts.progress.phase is Phase.FINISHED for facts in view.facts.values()) and not view.waiting
    is_at_work = bool(working) and not (has_left and has_batches_left(view, working))
    is_alone = bool(gathering_alone(view) or alone_in_trainer(view) or in_trainer_again(view))
    return is_at_work or _all_joined(view) or is_alone


def _an_epoch_ahead(view: Timeline, first: float) -> tuple[int, ...]:
    """Ranks that have finished all epochs while others, between batches, have more than one epoch left."""
    places = ((rank, facts.progress) for rank, facts in sorted(view.facts.items()))
    # After the end, Lightning's epoch counter is one higher than in the last epoch.
    return tuple(rank for rank, now in places if now.phase is Phase.FINISHED and now.epoch > first + 1)


def _equally_many(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether all are in the same batch, which is each one's last as far as known: they do not differ in their data."""
    loops = {view.facts[rank].progress.phase for rank in still}
    facts = [view.facts[rank] for rank in (*ended, *still)]
    # A rank that has left validation for the next epoch no longer shows how many batches it had there.
    if not loops.isdisjoint(_VALIDATIONS):
        facts = [each for each in facts if each.progress.phase in _VALIDATIONS]
    progress = [each.progress for each in facts]
    is_one_loop = len({now.phase in _VALIDATIONS for now in progress}) == 1 and len(facts) > len(still)
    may_be_last = all(now.is_last_batch for now in progress) or not any(map(_has_known_length, facts))
    is_one_batch = len({(now.epoch, now.batch_idx) for now in progress}) == 1 and progress[0].batch_idx >= 0
    return is_one_loop and may_be_last and is_one_batch and not _were_stopped(view, ended, still)


def _were_stopped(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether these ranks were asked to stop, and the others were not."""
    stopped = {rank for rank, trainer in view.trainers.items() if trainer.end is LoopEnd.SHOULD_STOP}
    return bool(ended) and stopped >= {*ended} and stopped.isdisjoint(still)


def _before_batches(view: Timeline, still: tuple[int, ...]) -> bool:
    """Whether these ranks wait in a hook before the first batch of a validation, so that no batch is missing yet."""
    places = [view.facts[rank].progress for rank in still]
    return all(now.phase in _VALIDATIONS and now.batch_idx < 0 and not _is_in_loop(now) for now in places)


def _validated(view: Timeline) -> dict[int, int]:
    """How many batches each rank has validated, as far as known."""
    checking = in_sanity_check(view)
    # After the sanity check, the Trainer's count begins anew.
    past = () if not checking else [rank for rank in view.facts if rank not in checking]
    completed = {rank: trainer.validated for rank, trainer in view.trainers.items()}
    return completed | {rank: view.facts[rank].steps.validated for rank in past}


def _went_through_sanity_check(view: Timeline, ended: tuple[int, ...]) -> bool:
    """False for ranks that have validated nothing when others are in the sanity check: they may have left it out."""
    return not in_sanity_check(view) or all(view.facts[rank].steps.validated > 0 for rank in ended)


def in_sanity_check(view: Timeline) -> tuple[int, ...]:
    """The ranks in the sanity check, ascending."""
    return tuple(rank for rank, facts in sorted(view.facts.items()) if facts.progress.phase is Phase.SANITY_CHECK)


def _validated_less(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether the ranks that have continued to training had fewer batches in the validation that others are ending."""
    validated = _validated(view)
    have_left = all(view.facts[rank].progress.phase is Phase.TRAIN for rank in ended)
    if not ended or not have_left or validated.keys() < view.facts.keys():
        return False
    # A batch is completed after its last hook.
    begun = {rank: validated[rank] + _ends_validated_batch(view.facts[rank].progress) for rank in still}
    return 0 < max(validated[rank] for rank in ended) < min(begun.values())


def _ends_validated_batch(progress: Progress) -> bool:
    return any(hook_words(action.name).endswith("on_validation_batch_end") for action in progress.actions)


def _validates_before(view: Timeline, validating: tuple[int, ...], training: tuple[int, ...]) -> bool:
    """Whether ranks are in a validation within an epoch, and the others train on after it (``val_check_interval``)."""
    phases = {rank: facts.progress.phase for rank, facts in view.facts.items()}
    are_apart = {phases[rank] for rank in validating} == {Phase.VALIDATE}
    are_apart = are_apart and {phases[rank] for rank in training} == {Phase.TRAIN}
    if not are_apart or not view.trainers.keys() >= {*validating, *training}:
        return False
    begun = {rank: trainer.batches_begun for rank, trainer in view.trainers.items()}
    # Otherwise, those may not validate at all, and these have ended their epoch early.
    made = {rank: facts.steps.validated for rank, facts in view.facts.items()}
    before = max(0, *(made[rank] - view.facts[rank].progress.batch_idx - 1 for rank in validating))
    have_validated = min(made[rank] for rank in training) > before
    return have_validated and max(begun[rank] for rank in validating) < min(begun[rank] for rank in training)


def _validated_it(view: Timeline, ended: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether the ranks past the batches of validation have also completed the batch in which the others wait."""
    if any(view.facts[rank].progress.phase not in _VALIDATIONS for rank in still):
        return False
    if without_validation(view, ended, still):
        return False
    validated = _validated(view)
    if not validated.keys() >= {*ended, *still}:
        return False
    return min(validated[rank] for rank in ended) > max(validated[rank] for rank in still)


def without_validation(view: Timeline, continued: tuple[int, ...], still: tuple[int, ...]) -> bool:
    """Whether the ranks that continue with training have skipped the whole validation that the others are in."""
    validating = {rank for rank, facts in view.facts.items() if facts.progress.phase is Phase.VALIDATE}
    trainers = {rank: view.facts[rank].trainer for rank in still}
    if validating != {*still} or not continued:
        return False
    if None in trainers.values():
        return False
    made = {view.facts[rank].steps.validated for rank in continued}
    begun = {(view.facts[rank].steps.validated, _begun_now(view.facts[rank])) for rank in still}
    return all(total - before in now for total, now in begun for before in made)


def _begun_now(facts: RankFacts) -> range:
    """How many batches of the present validation a rank may have begun; the one that it is in may not be complete."""
    over = facts.trainer.validated if facts.trainer is not None else 0
    is_within = facts.progress.batch_idx == over and _is_in_loop(facts.progress)
    return range(over + 1 if is_within else max(over, 1), over + 2)


@once
def batches_through_epoch(view: Timeline) -> dict[int, int]:
    """How many training batches each rank has had by the end of the epoch that the ranks behind have just trained on.

    Empty if some of these are still in its batches, if others are further ahead than in the next epoch, or if a number
    is unknown.
    """
    trainers = view.trainers
    epochs = {rank: facts.progress.epoch for rank, facts in view.facts.items()}
    first = min(epochs.values(), default=0)
    if trainers.keys() != epochs.keys() or {*epochs.values()} != {first, first + 1}:
        return {}
    if any(positions(view)[rank].stage < 1 for rank, epoch in epochs.items() if epoch == first):
        return {}
    before = {rank: one.batches_before for rank, one in trainers.items() if one.batches_before is not None}
    now = {rank: one.batches_begun if epochs[rank] == first else 0 for rank, one in trainers.items()}
    return {rank: count + now[rank] for rank, count in before.items()} if before.keys() == trainers.keys() else {}


def had_fewer_batches(view: Timeline, ranks: Iterable[int]) -> bool:
    """Whether these ranks are known to have had fewer batches by the end of an epoch than each of the others."""
    counts, few = batches_through_epoch(view), {*ranks}
    others = [count for rank, count in counts.items() if rank not in few]
    return bool(others) and max(counts[rank] for rank in few) < min(others)


def _has_known_length(facts: RankFacts) -> bool:
    of_epoch = facts.trainer.batches if facts.trainer is not None else None
    return of_epoch is not None or any(loader.batches is not None for loader in facts.loaders[:1])


def _all_joined(view: Timeline) -> bool:
    pending = [group for group in view.groups if group.seq is not None]
    return bool(pending) and all(view.joined(group) for group in pending)
