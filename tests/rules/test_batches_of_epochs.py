"""Batches are counted over epochs: a rank that is an epoch ahead may have had fewer of them."""

from dataclasses import replace

import pytest
from builders import BARRIER, GLOO, NEXT, job
from judged import first

from lightning_ncclsafe.facts import JobFacts, LoopEnd, Phase, StepFacts, TrainerFacts
from lightning_ncclsafe.rules.kit.positions import batches_through_epoch, had_fewer_batches
from lightning_ncclsafe.rules.kit.timeline import timeline

LENGTH = 7


def apart(*had: int | None, later: int = 1) -> JobFacts:
    """Ranks 0 and 1 validate after an epoch of seven batches; the others are so many epochs later, without validation.

    Args:
        had: How many batches each of these others had in that epoch.
        later: How many epochs they are ahead.
    """
    world = 2 + len(had)
    told = TrainerFacts(settings={"max_epochs": "6"}, batches=LENGTH)
    ended = replace(told, end=LoopEnd.DATA, batches_begun=LENGTH, batches_before=LENGTH, validated=1)
    options = {"phase": Phase.VALIDATE, "epoch": 1, "batch": 1, "last": True, "world": world, "action": "x"}
    behind = (
        replace(
            GLOO.rank(n, BARRIER, seq=61, outstanding=1, op="barrier", sizes=(), **options),  # type: ignore[arg-type]
            trainer=ended,
            steps=StepFacts(validated=4),
        )
        for n in range(2)
    )
    ahead = (
        replace(
            GLOO.waiting(n, seq=61, world=world, epoch=1 + later, batch=1),
            trainer=replace(told, batches_begun=2, batches_before=None if count is None else LENGTH + count),
            steps=StepFacts(validated=2),
        )
        for n, count in enumerate(had, 2)
    )
    return job(*behind, *ahead, world=world)


def test_a_rank_with_fewer_batches_in_the_epoch_before_has_run_out_of_data() -> None:
    finding = first(apart(6))
    assert (finding.rule, finding.ranks) == ("uneven-batches", (2,))
    assert finding.summary.startswith(
        "Rank 2 has run out of data (after 13 batches by the end of epoch 1; others had 14) while "
    )


@pytest.mark.parametrize(
    ("had", "later"),
    [((7,), 1), ((8,), 1), ((None,), 1), ((6,), 2), ((6, 7), 1)],
    ids=["as many", "more", "unknown", "two epochs ahead", "one of two"],
)
def test_a_rank_that_is_not_known_to_have_had_fewer_has_left_out_the_validation(
    had: tuple[int | None, ...], later: int
) -> None:
    facts = apart(*had, later=later)
    finding = first(facts)
    assert (finding.rule, finding.ranks) == ("stopped-early", tuple(range(2, 2 + len(had))))
    assert not had_fewer_batches(timeline(facts), finding.ranks)


def test_batches_are_counted_until_the_end_of_the_epoch_of_the_ranks_behind() -> None:
    assert batches_through_epoch(timeline(apart(6, 7))) == {0: 14, 1: 14, 2: 13, 3: 14}
    assert (
        batches_through_epoch(timeline(apart(6, 7, later=2))) == batches_through_epoch(timeline(apart(6, None))) == {}
    )


def test_of_an_epoch_that_some_ranks_are_still_in_nothing_is_counted() -> None:
    first_, *others = apart(6).ranks
    in_batch = replace(first_, progress=GLOO.working(0, seq=60, epoch=1, batch=3, action=NEXT).progress)
    for other in (in_batch, replace(first_, trainer=None)):
        assert batches_through_epoch(timeline(job(other, *others, world=3))) == {}
