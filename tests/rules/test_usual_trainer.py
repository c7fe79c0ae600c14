"""Where ranks wait in a Trainer with its defaults: in the sanity check, the progress bar, a checkpoint."""

from dataclasses import replace

import pytest
from builders import ALL_REDUCE, GLOO, SITE, USER_FILE, job, user
from call_scenes import ALL_GATHER, READ, key_read_by_one_rank
from judged import first
from judged import found as rules

from lightning_ncclsafe.facts import (
    Action,
    Frame,
    JobFacts,
    LoggedKey,
    LoopEnd,
    Phase,
    RankFacts,
    StepFacts,
    ThreadLockFacts,
    TrainerFacts,
)
from lightning_ncclsafe.rules.kit.positions import out_of_data_first, positions
from lightning_ncclsafe.rules.kit.timeline import timeline

GATHERS = {"op": "all_gather", "sizes": ((1,),), "outstanding": 1, "seq": 16}
TRAINER = TrainerFacts(settings={"num_sanity_val_steps": "2"}, batches_begun=0, end=LoopEnd.DATA)
CHECKPOINT = "[Callback]{}{{'monitor': {}, 'mode': 'min'}}.on_train_epoch_end"
SAVES = (
    Frame(file=f"{SITE}/lightning/pytorch/callbacks/model_checkpoint.py", line=493, function="on_train_epoch_end"),
    Frame(file=f"{SITE}/lightning/pytorch/strategies/parallel.py", line=109, function="reduce_boolean_decision"),
)


def validating(
    rank: int, *, validated: int, world: int, batch: int = 1, phase: Phase = Phase.SANITY_CHECK
) -> RankFacts:
    """In the user's all-gather in a batch of the sanity check, of which so many are complete."""
    line = user("validation_step", 46)
    facts = GLOO.rank(rank, line, ALL_GATHER, phase=phase, batch=batch, world=world, **GATHERS)  # type: ignore[arg-type]
    return replace(facts, trainer=replace(TRAINER, validated=validated), steps=StepFacts(validated=validated + 1))


def presenting(rank: int, *, validated: int, world: int) -> RankFacts:
    """Past the sanity check: it presents its loaders for training, before any batch."""
    facts = GLOO.waiting(rank, seq=16, batch=-1, world=world)
    actions = (Action(name="agreement:train_dataloader", for_s=23.0),)
    progress = replace(facts.progress, actions=actions, last_action="barrier:train_dataloader()")
    return replace(facts, progress=progress, trainer=TRAINER, steps=StepFacts(validated=validated))


def checked(validated: int, *, past: int, phase: Phase = Phase.SANITY_CHECK) -> JobFacts:
    """Rank 0 is in a batch of the sanity check, or of another validation, and the other two are past it."""
    others = [presenting(rank, validated=past, world=3) for rank in (1, 2)]
    return job(validating(0, validated=validated, world=3, phase=phase), *others, world=3)


def test_a_rank_that_waits_in_the_sanity_check_has_not_left_out_the_stage_that_others_present() -> None:
    assert "unpresented-loader" not in rules(checked(1, past=2))


@pytest.mark.parametrize(("past", "is_elsewhere"), [(6, False), (5, True)])
def test_a_rank_that_waits_in_a_validation_has_not_left_out_the_next_epoch(past: int, is_elsewhere: bool) -> None:
    """The others have had that validation, too, or fewer batches: then they may have left one out."""
    assert ("unpresented-loader" in rules(checked(5, past=past, phase=Phase.VALIDATE))) is is_elsewhere


def test_ranks_that_have_had_no_sanity_check_may_be_in_another_stage() -> None:
    assert first(checked(1, past=0)).rule == "unpresented-loader"
    assert out_of_data_first(timeline(checked(1, past=0))) == ()


def test_a_rank_that_works_in_the_sanity_check_has_not_presented_its_loader() -> None:
    works = replace(validating(0, validated=1, world=3), collectives=())
    works = replace(works, stack=works.stack[:-1], groups=())
    facts = job(works, *(presenting(rank, validated=2, world=3) for rank in (1, 2)), world=3)
    assert "unpresented-loader" in rules(facts)


@pytest.mark.parametrize(("validated", "past", "short"), [(1, 1, (1, 2)), (1, 2, ()), (0, 1, ())])
def test_who_had_fewer_batches_in_the_sanity_check_is_out_of_data_first(
    validated: int, past: int, short: tuple[int, ...]
) -> None:
    """Rank 0 waits in the batch after those that it has completed; whoever has had that one does not lack data."""
    assert out_of_data_first(timeline(checked(validated, past=past))) == short


def test_a_rank_past_the_batches_of_a_validation_has_had_the_one_in_which_others_wait() -> None:
    """The source of a broadcast goes on, and the others wait in an early batch for what never fits."""
    ahead = GLOO.waiting(2, seq=17, phase=Phase.VALIDATE, batch=5, world=3)
    ended = replace(ahead.progress, is_last_batch=True, actions=())
    ahead = replace(ahead, progress=ended, trainer=replace(TRAINER, validated=6), steps=StepFacts(validated=6))
    others = [validating(rank, validated=1, world=3, phase=Phase.VALIDATE) for rank in (0, 1)]
    assert out_of_data_first(timeline(job(*others, ahead, world=3))) == ()
    fewer = replace(ahead, trainer=replace(TRAINER, validated=1), steps=StepFacts(validated=1))
    assert out_of_data_first(timeline(job(*others, fewer, world=3))) == (2,)


def test_the_end_of_an_epoch_follows_its_validation() -> None:
    """Rank 1 saves a checkpoint after two batches of validation, and rank 0 waits in its third."""
    still = validating(0, validated=2, batch=2, world=2, phase=Phase.VALIDATE)
    saves = at_checkpoint(1, monitor="None", world=2)
    saves = replace(saves, trainer=replace(TRAINER, validated=2), steps=StepFacts(validated=2))
    facts = job(still, saves, world=2)
    assert out_of_data_first(timeline(facts)) == (1,)
    assert (first(facts).rule, first(facts).ranks) == ("uneven-batches", (1,))


@pytest.mark.parametrize(("had", "short"), [(2, (1,)), (3, ())])
def test_a_rank_that_trains_on_after_a_validation_within_an_epoch_is_ahead(had: int, short: tuple[int, ...]) -> None:
    """Rank 0 waits in the third batch of a validation in the middle of an epoch."""
    still = validating(0, validated=2, batch=2, world=2, phase=Phase.VALIDATE)
    still = replace(still, trainer=replace(TRAINER, validated=2, batches_begun=50))
    on = GLOO.waiting(1, seq=17, batch=50, world=2)
    on = replace(on, trainer=replace(TRAINER, validated=had, batches_begun=51), steps=StepFacts(validated=had))
    facts = job(still, on, world=2)
    assert out_of_data_first(timeline(facts)) == short
    told = "Rank 1 has run out of data (it is at batch 50 of epoch 0) while rank 0 is still in batch 2 of epoch 0"
    assert first(facts).summary.startswith(told) == bool(short)


METRICS = Frame(file=f"{SITE}/lightning/pytorch/loops/fit_loop.py", line=497, function="on_advance_end")


def test_the_metrics_of_an_epoch_are_reduced_after_its_validation_and_its_hooks() -> None:
    """Lightning shows no hook then, and rank 1 is no further than rank 2, which is in one."""
    still = validating(0, validated=2, batch=2, world=3, phase=Phase.VALIDATE)
    reduces = GLOO.rank(1, METRICS, ALL_REDUCE, seq=16, outstanding=1, op="all_reduce", sizes=((1,),), world=3)
    reduces = replace(reduces, trainer=replace(TRAINER, validated=2), steps=StepFacts(validated=2))
    saves = at_checkpoint(2, monitor="None", world=3)
    saves = replace(saves, trainer=reduces.trainer, steps=reduces.steps)
    facts = job(still, reduces, saves, world=3)
    assert out_of_data_first(timeline(facts)) == (1, 2)
    places = positions(timeline(facts))
    assert places[1][:2] == places[2][:2]
    said = [item.text for item in first(facts).evidence if item.source == "phase" and item.rank in (None, 1, 2)]
    assert any(text.endswith("This was its last batch.") for text in said)


def at_checkpoint(rank: int, *, monitor: str, world: int, kind: str = "ModelCheckpoint") -> RankFacts:
    """In a collective that ModelCheckpoint makes at the end of an epoch."""
    name = CHECKPOINT.format(kind, monitor)
    facts = GLOO.rank(rank, *SAVES, ALL_REDUCE, seq=16, outstanding=1, op="all_reduce", sizes=((1,),), world=world)
    progress = replace(facts.progress, actions=(Action(name=name, for_s=23.0),), is_last_batch=True)
    return replace(facts, progress=progress, trainer=TRAINER)


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "LastCheckpoint"])
@pytest.mark.parametrize(("monitor", "ranks"), [("None", (0,)), ("'val_loss'", (0, 1))])
def test_a_checkpoint_without_a_monitor_is_saved_on_all_ranks(monitor: str, ranks: tuple[int, ...], kind: str) -> None:
    """Rank 0 is in a call of the user's; one that monitors a value decides on each rank whether it saves."""
    line = user("on_train_epoch_end", 74)
    own = GLOO.rank(0, line, ALL_REDUCE, seq=16, outstanding=1, op="all_reduce", sizes=((11,),), last=True, world=2)
    own = replace(own, trainer=TRAINER)
    finding = first(job(own, at_checkpoint(1, monitor=monitor, world=2, kind=kind), world=2))
    assert finding.ranks == ranks
    assert finding.location == f"{USER_FILE}:74 in on_train_epoch_end"


def test_values_that_the_progress_bar_reads_are_not_read_by_the_users_code() -> None:
    """All ranks read them there; what differs is the metric, not the line that reads."""
    bar = Frame(
        file=f"{SITE}/lightning/pytorch/callbacks/progress/rich_progress.py", line=600, function="on_train_epoch_end"
    )
    read = {one.rank: one for one in key_read_by_one_rank(GLOO).ranks}
    metric = LoggedKey(name="score", hook="training_step", place=f"{USER_FILE}:53 in training_step", states=("a", "b"))
    for rank, facts in read.items():
        states = ("a", "b", "c") if rank == 1 else ("a", "b")
        read[rank] = replace(facts, steps=replace(facts.steps, logged=(replace(metric, states=states),)))
    assert "diverged-log-keys" not in rules(job(*(read[rank] for rank in sorted(read))))
    reading = read[1]
    hooks = [one for one in reading.stack if not (one.user and one.function == "on_validation_end")]
    place = hooks.index(READ)
    read[1] = replace(reading, stack=(*hooks[:place], bar, *hooks[place:]))
    finding = first(job(*(read[rank] for rank in sorted(read))))
    assert (finding.rule, finding.location) == ("diverged-log-keys", f"{USER_FILE}:53 in training_step")


def test_a_lock_whose_holder_runs_no_code_of_the_user_is_told_with_where_the_holder_is() -> None:
    writes = Frame(file=f"{SITE}/rich/console.py", line=2124, function="_write_buffer")
    lock = ThreadLockFacts(lock="self._lock", thread="Thread-1", stack=(writes,))
    behind = GLOO.rank(0, user("show", 9), seq=27, world=3)
    waiting = [GLOO.waiting(rank, seq=28, world=3) for rank in (1, 2)]
    finding = first(job(replace(behind, thread_lock=lock), *waiting, world=3))
    assert "which its thread 'Thread-1' has taken; it is at console.py:2124 in _write_buffer." in finding.summary
