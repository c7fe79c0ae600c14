"""Facts from different moments: what compares ranks is no longer sure."""

from collections.abc import Callable
from dataclasses import replace

import machine_scenes
import pytest
import scenes
from builders import GLOO, Backend

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.judging import judge

Scene = Callable[[Backend], JobFacts]
SAYS = "Rank 2 made progress again before all ranks had answered"


@pytest.mark.parametrize(
    "scene",
    [
        scenes.rank_zero_evaluates,
        scenes.checkpoint_is_written,
        scenes.slow_step,
        # Its rule reads exceptions, too, but here there is none.
        scenes.collective_under_a_condition,
    ],
)
def test_a_cause_that_compares_ranks_becomes_possible(scene: Scene) -> None:
    at_once, moved = judge(scene(GLOO)), judge(replace(scene(GLOO), moved=2))
    assert at_once.findings[0].confidence is not Confidence.POSSIBLE
    assert {finding.confidence for finding in moved.findings} == {Confidence.POSSIBLE}
    assert [finding.rule for finding in moved.findings] == [finding.rule for finding in at_once.findings]
    assert any(text.startswith(SAYS) for text in moved.unanswered)
    assert not any(text.startswith(SAYS) for text in at_once.unanswered)


@pytest.mark.parametrize("scene", [scenes.one_rank_fails, scenes.one_rank_was_killed, machine_scenes.starved_of_cores])
def test_an_exception_the_end_of_a_process_and_a_slow_machine_stay_what_they_are(scene: Scene) -> None:
    at_once, moved = judge(scene(GLOO)), judge(replace(scene(GLOO), moved=2))
    assert moved.findings[0] == at_once.findings[0]
    assert at_once.findings[0].confidence is not Confidence.POSSIBLE
