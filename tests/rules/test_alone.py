"""What rank 0 does alone: under a condition around a call of the Trainer, or in a hook; but not a fetch of a batch."""

from dataclasses import replace

import pytest
from builders import GLOO, job, user
from judged import found
from scenes import trainer_called_on_one_rank

from lightning_ncclsafe.facts import Phase
from lightning_ncclsafe.rules.kit import Timeline, alone_in_trainer


def is_of_rank_zero(condition: str) -> bool:
    called_once = trainer_called_on_one_rank(GLOO)
    (facts,) = called_once.ranks
    called, *below = facts.stack
    facts = replace(facts, stack=(replace(called, rank_condition=f"{condition}  (line 201)"), *below))
    return bool(alone_in_trainer(Timeline(replace(called_once, ranks=(facts,)))))


@pytest.mark.parametrize(
    "condition",
    [
        "if rank == 0:",
        "if not rank:",
        "if trainer.is_global_zero: trainer.test(model)",
        "else of if rank != 0:",
        "else of if not trainer.is_global_zero:",
        "past return under if rank > 0:",
        "past return under if rank:",
    ],
)
def test_a_condition_on_rank_zero(condition: str) -> None:
    assert is_of_rank_zero(condition)


@pytest.mark.parametrize(
    "condition",
    [
        "if rank != -1:",
        "if world_size > 1: rank_count = 0",
        "else of if rank == 0:",
        "else of if trainer.is_global_zero:",
        "past return under if rank == 0:",
        "past return under if is_main:",
    ],
)
def test_a_condition_that_others_meet_too(condition: str) -> None:
    assert not is_of_rank_zero(condition)


@pytest.mark.parametrize(
    ("action", "is_alone"),
    [("[Callback]Scores.on_validation_epoch_end", True), ("[_EvaluationLoop].val_next", False)],
)
def test_a_rank_that_fetches_a_batch_does_no_work_of_its_own(action: str, is_alone: bool) -> None:
    own = GLOO.working(0, user("read", 33), seq=60, action=action, phase=Phase.VALIDATE, batch=3)
    others = (GLOO.waiting(rank, seq=61) for rank in (1, 2, 3))
    assert ("rank-zero-only-work" in found(job(own, *others))) is is_alone
