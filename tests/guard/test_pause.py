"""A pause that is announced: where it is noted, and what the others make of it."""

import threading

import pytest
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_ncclsafe import pause
from lightning_ncclsafe.probes.trainer.actions import ActionTracker


@pytest.fixture
def tracker() -> ActionTracker:
    made = ActionTracker()
    made.attach(PassThroughProfiler())
    return made


def names(tracker: ActionTracker) -> list[str]:
    return [action.name for action in tracker.actions()]


def test_it_is_an_action_of_the_trainer_that_runs(tracker: ActionTracker) -> None:
    with tracker.action("step"), pause("a debugger"):
        assert names(tracker) == ["step", "pause:a debugger"]
    assert names(tracker) == []


def test_what_is_raised_in_it_ends_it(tracker: ActionTracker) -> None:
    with pytest.raises(KeyError), pause():
        raise KeyError
    assert names(tracker) == []


def test_without_a_trainer_it_does_nothing(tracker: ActionTracker) -> None:
    tracker.detach()
    with pause():
        assert names(tracker) == []


def test_on_another_thread_it_does_nothing(tracker: ActionTracker) -> None:
    seen: list[list[str]] = []

    def announce() -> None:
        with pause():
            seen.append(names(tracker))

    thread = threading.Thread(target=announce)
    thread.start()
    thread.join()
    assert seen == [[]]
