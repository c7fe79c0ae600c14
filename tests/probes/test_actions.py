"""The tracker of what Lightning is doing, and the user's profiler, which must not notice."""

import copy
import pickle
import threading
from typing import Any

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from lightning_ncclsafe.probes.trainer.actions import ActionTracker


def names(tracker: ActionTracker) -> list[str]:
    return [action.name for action in tracker.actions()]


def test_is_in_finds_an_action_at_any_depth() -> None:
    tracker = ActionTracker()
    with tracker.action("save_checkpoint"), tracker.action("barrier:x"):
        assert tracker.is_in("save_checkpoint")
        assert tracker.is_in("barrier:")
    assert not tracker.is_in("save_checkpoint")


def test_actions_nest_and_the_last_to_end_is_known() -> None:
    tracker = ActionTracker()
    with tracker.action("epoch"):
        with tracker.action("step"):
            assert names(tracker) == ["epoch", "step"]
        assert (names(tracker), tracker.last_action) == (["epoch"], "step")
    assert (names(tracker), tracker.last_action) == ([], "epoch")


def test_each_action_has_its_own_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("lightning_ncclsafe.probes.trainer.actions.monotonic", lambda: now)
    tracker = ActionTracker()
    tracker.enter("epoch")
    now = 103.0
    tracker.enter("step")
    now = 103.5
    assert [action.for_s for action in tracker.actions()] == [3.5, 0.5]


def test_transitions_change_with_every_start_and_end() -> None:
    tracker = ActionTracker()
    seen = [tracker.transitions]
    for act in (tracker.enter, tracker.enter, tracker.leave, tracker.leave):
        act("step")
        seen.append(tracker.transitions)
    assert len(set(seen)) == len(seen)


def test_an_exception_ends_the_action() -> None:
    tracker = ActionTracker()
    with pytest.raises(KeyError), tracker.action("epoch"):
        tracker.enter("step")  # with start() and stop(), as user code may, and no stop() on the way of an exception
        tracker.enter("forward")
        raise KeyError
    assert names(tracker) == []
    assert tracker.last_action == "epoch"


def test_the_innermost_of_equal_names_ends() -> None:
    tracker = ActionTracker()
    for name in ("run", "step", "run", "forward"):
        tracker.enter(name)
    tracker.leave("run")
    assert names(tracker) == ["run", "step"]


def test_an_end_without_a_start_changes_nothing_else() -> None:
    tracker = ActionTracker()
    tracker.enter("epoch")
    tracker.leave("never begun")
    assert names(tracker) == ["epoch"]


def test_other_threads_are_ignored() -> None:
    tracker = ActionTracker()
    tracker.enter("epoch")
    before = tracker.transitions

    def other() -> None:
        tracker.enter("async save")
        tracker.leave("epoch")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (names(tracker), tracker.transitions, tracker.last_action) == (["epoch"], before, "")


class OwnProfile(Profiler):
    """Writes down what it is asked, and has a ``profile`` of its own, as ``PyTorchProfiler`` has not but may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def start(self, action_name: str) -> None:
        self.asked.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.asked.append(f"stop {action_name}")

    def profile(self, action_name: str) -> Any:
        self.asked.append(f"profile {action_name}")
        return super().profile(action_name)


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler, OwnProfile])
def test_an_attached_tracker_follows_all_and_restores_the_profiler(kind: type[Profiler]) -> None:
    profiler, tracker = kind(), ActionTracker()
    before = dict(vars(profiler))
    tracker.attach(profiler)
    with profiler.profile("epoch") as name:
        assert (name, names(tracker)) == ("epoch", ["epoch"])
        profiler.start("step")
        assert names(tracker) == ["epoch", "step"]
        profiler.stop("step")
    assert (names(tracker), tracker.last_action) == ([], "epoch")
    tracker.detach()
    assert {name: vars(profiler).get(name) for name in ("start", "stop", "profile")} == dict.fromkeys(
        ("start", "stop", "profile")
    )
    assert set(vars(profiler)) == set(before)
    heard = tracker.transitions
    with profiler.profile("epoch"):
        assert names(tracker) == []
    assert tracker.transitions == heard


def test_an_exception_in_profile_ends_the_action_for_both() -> None:
    profiler, tracker = OwnProfile(), ActionTracker()
    tracker.attach(profiler)
    with pytest.raises(KeyError), profiler.profile("epoch"):
        raise KeyError
    assert names(tracker) == []
    assert profiler.asked == ["profile epoch", "start epoch", "stop epoch"]


def test_the_exception_in_a_profiled_hook_is_not_swallowed() -> None:
    profiler, tracker = PassThroughProfiler(), ActionTracker()
    tracker.attach(profiler)
    with pytest.raises(KeyError, match="mine"), profiler.profile("epoch"):
        raise KeyError("mine")


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
def test_only_a_failing_action_is_reported(kind: type[Profiler]) -> None:
    profiler, tracker = kind(), ActionTracker()
    told: list[tuple[str, str]] = []
    tracker.on_failed = lambda name, error: told.append((name, str(error)))
    tracker.attach(profiler)
    for name in ("save_checkpoint", "[Callback]ModelCheckpoint.on_validation_end"):
        with pytest.raises(OSError, match=name[-5:]), profiler.profile(name):
            raise OSError(name)
    with profiler.profile("save_checkpoint"):
        pass
    names = ("save_checkpoint", "[Callback]ModelCheckpoint.on_validation_end")
    assert told == [(name, name) for name in names]
    assert not tracker.actions()


def test_the_users_profiler_still_records_its_durations() -> None:
    profiler, tracker = SimpleProfiler(), ActionTracker()
    tracker.attach(profiler)
    for _ in range(3):
        with profiler.profile("step"):
            pass
    tracker.detach()
    with profiler.profile("step"):
        pass
    assert len(profiler.recorded_durations["step"]) == 4
    assert not profiler.current_actions


def test_instance_attributes_are_restored() -> None:
    profiler, tracker = PassThroughProfiler(), ActionTracker()
    started: list[str] = []
    profiler.start = own = started.append  # type: ignore[method-assign]
    tracker.attach(profiler)
    with profiler.profile("step"):
        assert names(tracker) == ["step"]
    tracker.detach()
    assert started == ["step"]
    assert vars(profiler)["start"] is own
    assert "stop" not in vars(profiler)


def test_detach_works_twice_or_without_attach() -> None:
    tracker = ActionTracker()
    tracker.detach()
    profiler = PassThroughProfiler()
    tracker.attach(profiler)
    tracker.detach()
    profiler.start = own = print  # type: ignore[assignment]
    tracker.detach()
    assert vars(profiler)["start"] is own


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda profiler: pickle.loads(pickle.dumps(profiler))])
def test_an_attached_profiler_can_be_copied(kind: type[Profiler], copied: Any) -> None:
    profiler, tracker = kind(), ActionTracker()
    # Of a call of the Trainer, with its threads, connections and locks.
    of_call = threading.Lock()
    tracker.on_failed = lambda *_, lock=of_call: None
    tracker.listeners = (lambda *_, lock=of_call: None,)
    tracker.attach(profiler)
    twin = copied(profiler)
    heard = tracker.transitions
    with twin.profile("step"):
        assert names(tracker) == []
    assert tracker.transitions == heard
    if isinstance(twin, SimpleProfiler) and isinstance(profiler, SimpleProfiler):
        assert (len(twin.recorded_durations["step"]), len(profiler.recorded_durations["step"])) == (1, 0)
