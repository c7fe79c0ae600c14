"""Of a loop, the line is shown that takes longest, not the one at which a look happens to find it."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ncclsafe.code.libraries import COLLECTIVES
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process import stack_samples
from lightning_ncclsafe.probes.process.stack_samples import StackSamples, is_in_loop, outside_common_loop

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
    assert len(samples._since.samples) < 100


def test_progress_noted_while_samples_are_compared_does_no_harm(
    samples: StackSamples, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog notes; the main thread may look as it leaves."""
    sample(at(12), at(12), at(12), at(12))
    monkeypatch.setattr(stack_samples, "is_in_wait", lambda _: samples.note(2))
    assert samples.usual(at(13), 1) == at(12)


SOURCE = """\
def fitted(rows, centers, rank):
    shift = 1.0
    while not shift < 0.1:
        moved = means(rows, centers)
        shift = distance(moved, centers)
        centers = moved
    while True:
        rows = next(rows)
        centers = means(rows, centers)
    for row in rows:
        a(row)
        b(row)
    while rows:
        for row in rows:
            a(row)
            b(row)
        if rank == 0:
            a(rows)
            b(rows)
        xs = [
            a(row)
            for row in rows
        ]
    else:
        a(rows)
    return centers


class Net:
    def fitted(self):
        a(1)
        b(2)


def means(rows, centers):
    return sum(
        rows
    )
"""
TORCH = Frame(file="/venv/torch/functional.py", line=9, function="norm")


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


Looped = Callable[..., tuple[str, ...]]


@pytest.fixture
def looped(source: str, samples: StackSamples, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> Looped:
    """What is shown of a thread that was at these lines, in this order, twice over: its lines, below the outer one."""

    def show(*lines: int | str, now: int | str | None = None, times: int = 2) -> tuple[str, ...]:
        monkeypatch.setattr(stack_samples, "_MORE", 0)
        stacks = [stack_at(source, line) for line in lines]
        sample(*stacks * times)
        return lines_of(samples.outside_loop(stack_at(source, lines[-1] if now is None else now), lambda: 1))

    return show


def stack_at(source: str, line: int | str) -> tuple[Frame, ...]:
    """The stack at a line of `fitted`, or at two, ``"4 means:36"``; it ends in a library."""
    calls = [call.rpartition(":") for call in f"fitted:{line}".split()]
    return (
        OUTER,
        *(Frame(file=source, line=int(number), function=function, user=True) for function, _, number in calls),
        TORCH,
    )


def lines_of(stack: tuple[Frame, ...]) -> tuple[str, ...]:
    return tuple(f"{frame.function}:{frame.line}" for frame in stack if frame != OUTER)


def test_a_thread_that_goes_round_is_at_the_head_of_its_loop(looped: Looped) -> None:
    assert looped("4 means:36", 5, "4 means:37", 6, 3) == ("fitted:3",)


def test_one_of_two_lines_may_take_longer(looped: Looped) -> None:
    assert looped(3, 3, 3, 3, 4) == ("fitted:3",)


@pytest.mark.parametrize(
    "lines",
    [
        # One line, with what it calls, takes longest.
        [*[4] * 9, 5],
        [*["4 means:36"] * 18, 5, 6],
        # It went round, and waits at one line since.
        [*[3, 4, 5] * 3, *[6] * 13],
        # The call of one pass has not returned.
        ["4 means:36", "4 means:37"],
        # No loop is around all lines, or one that does not say when it ends.
        [2, 4, 5, 6],
        [8, 9],
        [11, 12],
        [15, 16],
        [14, 15, 16],
        [21, 22],
        [31, 32],
        [14, 25],
        # One line of the present function is in another loop.
        [4, 5, 9],
    ],
)
def test_a_thread_that_goes_round_in_no_while_loop_is_where_it_is(looped: Looped, lines: list[int | str]) -> None:
    assert looped(*lines, times=4) == lines_of(stack_at("", lines[-1]))


LOOP = """\
def fitted(rows, tol):
    {head}
        moved = means(rows)
        {around}
            {leaves}
        rows = moved
"""


@pytest.mark.parametrize(
    ("head", "around", "leaves", "ends_at"),
    [
        ("while True:", "if distance(moved) < tol:", "return moved", 4),
        ("while 1:", "if distance(moved) < tol:", "break", 4),
        ("for step in itertools.count():", "if distance(moved) < tol:", "break", 4),
        ("while True:", "if distance(moved) < tol:", "raise ValueError", 4),
        ("while True:", "if rows:", "if distance(moved) < tol:\n                break", 4),
        ("while True:", "if distance(moved) < tol:", "break\n        if rows:\n            raise ValueError", 0),
        (
            "while True:",
            "if rows:",
            "return\n        for row in rows:\n            a()\n        else:\n            break",
            0,
        ),
        ("for step in moves.count(tol):", "if distance(moved) < tol:", "break", 0),
        ("while True:", "if distance(moved) < tol:", "break\n        if rows:\n            return", 0),
        ("while True:", "for row in rows:", "break", 0),
        ("while True:", "with lock:", "return", 0),
        ("while True:", "def inner():", "return moved", 0),
        ("for row in rows:", "if distance(moved) < tol:", "break", 0),
    ],
)
def test_a_loop_without_end_depends_on_the_only_condition_that_leaves_it(
    tmp_path: Path, samples: StackSamples, sample: Sample, head: str, around: str, leaves: str, ends_at: int
) -> None:
    path = tmp_path / "endless.py"
    path.write_text(LOOP.format(head=head, around=around, leaves=leaves))
    stacks = [stack_at(str(path), line) for line in (3, 4, 6)]
    sample(*stacks * 3)
    shown = lines_of(samples.outside_loop(stacks[0], lambda: 1))
    assert shown == ((f"fitted:{ends_at}",) if ends_at else ("fitted:3", "norm:9"))


def test_the_innermost_loop_around_all_lines_counts(looped: Looped) -> None:
    assert looped(15, 16, 20) == ("fitted:13",)


def test_what_some_ranks_do_in_a_loop_is_not_lost(looped: Looped) -> None:
    assert looped(18, 19, 14) == ("fitted:14", "norm:9")


def test_a_thread_that_passes_line_after_line_goes_round_in_nothing(looped: Looped) -> None:
    assert looped(3, 3, 4, 4, 5, 5, 6, 6, times=1) == ("fitted:6", "norm:9")
    assert looped(3, times=1) == ("fitted:3",)


def test_few_samples_show_no_loop(looped: Looped) -> None:
    assert looped(4, 5) == ("fitted:5", "norm:9")


def test_a_thread_that_has_left_the_loop_is_where_it_is(looped: Looped) -> None:
    assert looped(4, 5, 6, 3, now=27) == ("fitted:27", "norm:9")


def test_a_thread_that_waits_for_others_in_its_loop_is_where_it_is(looped: Looped, source: str, sample: Sample) -> None:
    sample((*stack_at(source, 4), WAIT), stack_at(source, 4))
    assert looped(4, 5, 6, 3) == ("fitted:3", "norm:9")


def test_progress_while_samples_are_taken_says_nothing(
    source: str, samples: StackSamples, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = iter([1, 2])
    sample(*[stack_at(source, line) for line in (3, 4, 5, 6)] * 3)
    assert samples.outside_loop(stack_at(source, 4), lambda: next(positions)) == stack_at(source, 4)


def test_more_samples_are_taken_of_a_thread_in_a_loop(
    source: str, samples: StackSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples.note(1)
    lines = itertools.cycle([3, 4, 5, 6])
    taken: list[int] = []

    def take() -> tuple[Frame, ...]:
        taken.append(next(lines))
        return stack_at(source, taken[-1])

    monkeypatch.setattr(stack_samples, "main_thread_stack", take)
    monkeypatch.setattr(stack_samples, "_MORE_S", 20.0)
    assert lines_of(samples.outside_loop(stack_at(source, 4), lambda: 1)) == ("fitted:3",)
    assert len(taken) == 16
    assert samples.outside_loop(stack_at(source, 27), lambda: 1) == stack_at(source, 27)
    assert samples.outside_loop((*stack_at(source, 4), WAIT), lambda: 1) == (*stack_at(source, 4), WAIT)
    assert len(taken) == 16


def test_a_process_that_was_asked_again_is_at_the_head_of_its_loop(source: str) -> None:
    stacks = [stack_at(source, line) for line in (4, 4, 5)]
    assert is_in_loop(stacks[0])
    assert lines_of(outside_common_loop(stacks)) == ("fitted:3",)
    assert outside_common_loop(stacks[:2]) == stacks[0]
    assert outside_common_loop([]) == ()
    assert not is_in_loop(stack_at(source, 27))
    assert not is_in_loop(())
