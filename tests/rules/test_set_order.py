"""Calls and groups in the order of a set, which may differ between processes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import GLOO, USER_FILE
from call_scenes import another_size, groups_in_another_order
from judged import first

from lightning_ncclsafe.facts import Frame, JobFacts, RankFacts
from lightning_ncclsafe.rules.kit import REMEDY_ORDER_OF_SET, Confidence

LOOP = "for name in names  (line 44)"
MADE = f"{USER_FILE}:24 in __init__"


def over_set(facts: JobFacts, line: int) -> JobFacts:
    """The same job, where this line is in a loop over a set."""

    def known(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
        return tuple(replace(frame, over_set=LOOP) if frame.line == line else frame for frame in stack)

    def with_loop(rank: RankFacts) -> RankFacts:
        calls = tuple(replace(call, stack=known(call.stack)) for call in rank.collectives)
        return replace(rank, stack=known(rank.stack), collectives=calls)

    return replace(facts, ranks=tuple(map(with_loop, facts.ranks)))


@pytest.mark.parametrize(
    ("scene", "rule", "line"),
    [(groups_in_another_order, "crossed-groups", 68), (another_size, "mismatched-collective", 57)],
)
def test_calls_in_a_loop_over_a_set(scene: Callable[..., JobFacts], rule: str, line: int) -> None:
    before, finding = first(scene(GLOO)), first(over_set(scene(GLOO), line))
    assert (finding.rule, finding.ranks, finding.location) == (rule, before.ranks, before.location)
    assert finding.decided_at == f"{USER_FILE}:44 in training_step"
    assert finding.summary.endswith(
        "`for name in names` (line 44) goes over a set, whose order may differ between processes."
    )
    assert finding.remedy.startswith(REMEDY_ORDER_OF_SET)


def test_a_loop_over_a_set_around_another_line_is_not_told() -> None:
    assert first(over_set(groups_in_another_order(GLOO), 12)) == first(groups_in_another_order(GLOO))


def made_over_set(facts: JobFacts, *places: str, completed: int = 0, odd: tuple[int, ...] = (0, 1, 2)) -> JobFacts:
    """The same job, with groups that were made at these lines, and what they have completed; one has these members."""

    def with_groups(rank: RankFacts) -> RankFacts:
        own = (replace(one, last_completed=completed, ranks=(0, 1, 2)) for one in rank.groups)
        groups = tuple(replace(one, ranks=odd) if rank.rank == 1 else one for one in own)
        return replace(rank, groups=groups, steps=replace(rank.steps, groups_over_set=places))

    return replace(facts, ranks=tuple(map(with_groups, facts.ranks)))


def test_groups_that_are_made_in_a_loop_over_a_set_are_other_ones_on_each_rank() -> None:
    finding = first(made_over_set(groups_in_another_order(GLOO), MADE))
    assert (finding.rule, finding.ranks, finding.location) == ("crossed-groups", (0, 1), MADE)
    assert finding.confidence is Confidence.LIKELY
    assert "The groups are made in a loop over a set at" in finding.summary
    assert finding.remedy == REMEDY_ORDER_OF_SET


@pytest.mark.parametrize(
    "facts",
    [
        made_over_set(groups_in_another_order(GLOO), MADE, completed=7),
        made_over_set(groups_in_another_order(GLOO), MADE, odd=(0, 1)),
        made_over_set(groups_in_another_order(GLOO), MADE, f"{USER_FILE}:31 in setup"),
        made_over_set(groups_in_another_order(GLOO)),
    ],
    ids=["have worked", "other members", "two lines", "none"],
)
def test_groups_that_are_not_confused_by_the_order_of_a_set(facts: JobFacts) -> None:
    assert first(facts).location != MADE
    assert "goes over a set" not in first(facts).summary and "over a set" not in first(facts).summary
