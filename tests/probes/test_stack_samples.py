"""Of a loop, the line is shown that takes longest, not the one at which a look happens to find it."""

from collections.abc import Callable

import pytest

from lightning_ncclsafe.code.libraries import COLLECTIVES
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process import stack_samples
from lightning_ncclsafe.probes.process.stack_samples import StackSamples

OUTER = Frame(file="train.py", line=7, function="setup", user=True)
WAIT = Frame(file="/venv/torch/distributed/distributed_c10d.py", line=5356, function="barrier")

Sample = Callable[..., None]


def at(line: int, *below: Frame, function: str = "fitted") -> tuple[Frame, ...]:
    return (OUTER, Frame(file="train.py", line=line, function=function, user=True), *below)


@pytest.fixture
def samples() -> StackSamples:
    return StackSamples()


@pytest.fixture
def sample(samples: StackSamples, monkeypatch: pytest.MonkeyPatch) -> Sample:
    def take(*stacks: tuple[Frame, ...], position: int = 1) -> None:
        for stack in stacks:
            monkeypatch.setattr(stack_samples, "main_thread_stack", lambda stack=stack: stack)
            samples.note(position)

    # The first call only notes where the rank is.
    take(at(1))
    return take


def test_the_line_that_takes_longest_is_shown(samples: StackSamples, sample: Sample) -> None:
    sample(at(12), at(13), at(12), at(12), at(12))
    assert samples.usual(at(13), 1) == at(12)
    assert samples.usual(at(12), 1) == at(12)


def test_a_line_that_takes_little_longer_does_not_replace_the_present_one(
    samples: StackSamples, sample: Sample
) -> None:
    sample(at(12), at(13), at(12), at(12))
    assert samples.usual(at(13), 1) == at(13)


def test_samples_of_other_functions_and_from_before_the_last_progress_do_not_count(
    samples: StackSamples, sample: Sample
) -> None:
    sample(at(12), at(12), at(12))
    assert samples.usual(at(30, function="saved"), 1) == at(30, function="saved")
    assert samples.usual(at(13), 2) == at(13)
    sample(at(12), position=2)
    assert samples.usual(at(13), 2) == at(13)


def test_a_rank_that_waits_is_where_it_is(samples: StackSamples, sample: Sample) -> None:
    assert COLLECTIVES.has(WAIT.file, WAIT.function)
    sample(at(12), at(12), at(12), at(12))
    assert samples.usual(at(13, WAIT), 1) == at(13, WAIT)


def test_recursion_does_not_fill_the_memory(samples: StackSamples, sample: Sample) -> None:
    sample(*(at(12, *[OUTER] * depth) for depth in range(200)))
    assert len(samples._since[1]) < 100


def test_progress_noted_while_samples_are_compared_does_no_harm(
    samples: StackSamples, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog notes; the main thread may look as it leaves."""
    sample(at(12), at(12), at(12), at(12))
    monkeypatch.setattr(stack_samples, "is_in_wait", lambda _: samples.note(2))
    assert samples.usual(at(13), 1) == at(12)
