"""Which conditions around a call of the Trainer are those of rank 0."""

from dataclasses import replace

import pytest
from builders import GLOO
from scenes import trainer_called_on_one_rank

from lightning_ncclsafe.rules.kit import Timeline, alone_in_trainer


def is_of_rank_zero(condition: str) -> bool:
    job = trainer_called_on_one_rank(GLOO)
    (facts,) = job.ranks
    called, *below = facts.stack
    facts = replace(facts, stack=(replace(called, rank_condition=f"{condition}  (line 201)"), *below))
    return bool(alone_in_trainer(Timeline(replace(job, ranks=(facts,)))))


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
