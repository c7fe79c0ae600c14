"""The timeouts of real gloo groups, as phases begin and end."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from lightning_ncclsafe._torch import build, process_groups, stores
from lightning_ncclsafe.facts import VOTE_AHEAD_GROUP, VOTE_GROUP, Phase
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard import group_timeouts
from lightning_ncclsafe.guard.group_timeouts import GroupTimeouts
from lightning_ncclsafe.settings import Limits, check_limits

TRAIN, CHECKPOINT, INIT = PhaseKind(phase=Phase.TRAIN), PhaseKind(phase=Phase.CHECKPOINT), PhaseKind(phase=Phase.INIT)
LIMITS = check_limits(None, 30, "abort", {"train": 100.0, "checkpoint": 1200.0})
HOUR = timedelta(hours=1)


class Followed(GroupTimeouts):
    """Is told the moment by hand."""

    def __init__(self, limits: Limits) -> None:
        self.now = INIT
        super().__init__(limits, lambda: self.now.limit_name)

    def enter(self, phase_kind: PhaseKind, action: str = "barrier:x") -> None:
        self.now = phase_kind
        self.listen(action)


def timeout_s(group: Any) -> float:
    """As the back end's own options say."""
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def run(folder: Path, body: Callable[[int], None]) -> None:
    ended = run_ranks(2, body, folder, suspect_after_s=20, timeout_s=30)
    assert ended.exit_codes == [0, 0], ended.said


def test_groups_follow_the_phase_timeout_and_are_restored(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        world, early = dist.group.WORLD, dist.new_group([0, 1])
        own, votes = (
            dist.new_group([0, 1], timeout=HOUR),
            dist.new_group(timeout=timedelta(seconds=77), group_desc=VOTE_GROUP),
        )
        alone = dist.new_group([1])  # of which rank 0 is no member
        phases = Followed(LIMITS)
        phases.start()
        assert (timeout_s(world), timeout_s(early)) == (45, 45)
        phases.enter(TRAIN)
        assert (timeout_s(world), timeout_s(early), timeout_s(own), timeout_s(votes)) == (115, 115, 3600, 77)
        assert rank == 0 or timeout_s(alone) == 115
        late = dist.new_group([0, 1])
        phases.enter(TRAIN)
        assert timeout_s(late) == 1800
        phases.enter(CHECKPOINT, "save_checkpoint")
        assert [timeout_s(group) for group in (world, early, late, own)] == [1215, 1215, 1215, 3600]
        dist.destroy_process_group(late)
        phases.enter(TRAIN, "[Callback]X.on_train_batch_end")
        assert [timeout_s(group) for group in (world, early, own)] == [115, 115, 3600]
        phases.restore()
        assert [timeout_s(group) for group in (world, early, own, votes)] == [45, 1800, 3600, 77]

    run(tmp_path, body)


@pytest.mark.skipif(not build.GLOO_TIMEOUT_CHANGES, reason="this torch's gloo keeps a group's initial timeout")
def test_a_collective_times_out_by_the_phase_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_timeouts, "BACKSTOP_S", 0.0)
    limits = check_limits(None, 30, "abort", {"train": 0.5, "checkpoint": 20.0})

    def body(rank: int) -> None:
        waited, changed, called_before = dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([0, 1])
        phases = Followed(limits)
        if rank == 0:
            phases.enter(CHECKPOINT)
            # What is in flight keeps its 20 s when the limit becomes half a second,
            long = dist.all_reduce(torch.ones(1), group=called_before, async_op=True)
            phases.enter(TRAIN)
            short = dist.all_reduce(torch.ones(1), group=changed, async_op=True)
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="Timed out waiting 500ms"):
                dist.all_reduce(torch.ones(1), group=waited)
            assert 0.4 < time.monotonic() - began < 15
            # and its half a second when it becomes 20 s.
            phases.enter(CHECKPOINT)
            with pytest.raises(RuntimeError, match="Timed out waiting 500ms"):
                short.wait()
            assert time.monotonic() - began < 15
        turn = stores.own_connection("turn")
        if rank == 0:
            turn.set("over", "")
            long.wait()
        else:
            turn.wait(["over"])
            dist.all_reduce(torch.ones(1), group=called_before)
        dist.barrier()

    run(tmp_path, body)


class FakeGroup:
    """A group that remembers what is set."""

    def __init__(self, timeout_s: float) -> None:
        self.name, self.description, self.timeout_s = f"{id(self)}", "", timeout_s
        self.set_to: list[float] = []

    def set_timeout(self, timeout_s: float) -> None:
        self.set_to.append(timeout_s)
        self.timeout_s = timeout_s


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[FakeGroup]:
    found: list[FakeGroup] = []
    monkeypatch.setattr(process_groups, "timed_groups", lambda: found)
    return found


def test_without_phase_limits_mesh_groups_get_the_strategys_timeout(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        own, votes = (
            dist.new_group([0, 1], timeout=HOUR),
            dist.new_group(timeout=timedelta(seconds=1800), group_desc=VOTE_AHEAD_GROUP),
        )
        phases = Followed(check_limits(None, 30, "abort"))
        phases.start()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        alone, everybody = mesh.get_all_groups()
        # That of all ranks is the one that is there already, in newer releases of torch.
        before = timeout_s(everybody)
        assert timeout_s(alone) == 1800 and before in (45, 1800)
        phases.start()
        assert [timeout_s(group) for group in (alone, everybody, own, votes)] == [45, 45, 3600, 1800]
        phases.restore()
        assert [timeout_s(group) for group in (alone, everybody, own, votes)] == [1800, before, 3600, 1800]

    run(tmp_path, body)


def test_later_groups_get_the_timeout_of_the_same_phase(groups: list[FakeGroup]) -> None:
    groups.append(FakeGroup(45))
    phases = Followed(LIMITS)
    phases.now = TRAIN
    phases.start()
    groups.append(FakeGroup(1800))
    phases.start()
    assert [group.timeout_s for group in groups] == [115, 115]
    phases.restore()
    assert [group.timeout_s for group in groups] == [45, 1800]


def test_without_phase_limits_nothing_is_set_or_read(groups: list[FakeGroup]) -> None:
    groups.append(FakeGroup(1815))
    phases = Followed(check_limits(None, None, "abort"))
    phases._limit_name = lambda: pytest.fail("nobody asks")
    phases.start()
    phases.enter(TRAIN)
    phases.restore()
    assert groups[0].set_to == []


def test_batch_hooks_do_not_trigger_a_check(groups: list[FakeGroup]) -> None:
    groups.append(FakeGroup(45))
    phases = Followed(LIMITS)
    phases.enter(TRAIN, "[Callback]X.on_train_start")
    asked: list[str] = []
    phases._limit_name = lambda: asked.append("") or "train"  # type: ignore[func-returns-value]
    for name in ("run_training_batch", "[Strategy]SafeDDP.training_step", "[Callback]X.on_train_batch_start", ""):
        for _ in range(50):
            phases.listen(name)
    assert not asked
    phases.listen("[_TrainingEpochLoop].train_dataloader_next")
    assert len(asked) == 1


@pytest.mark.parametrize("phase_kind", [CHECKPOINT, PhaseKind(phase=Phase.TRAIN, first=True)])
def test_the_end_of_a_checkpoint_or_first_batch_is_noticed(groups: list[FakeGroup], phase_kind: PhaseKind) -> None:
    groups.append(FakeGroup(45))
    phases = Followed(LIMITS)
    phases.listen("run_training_batch")
    phases.enter(phase_kind, "[Callback]X.on_train_epoch_start")
    phases.enter(TRAIN, "run_training_batch")
    assert groups[0].timeout_s == 115


def test_a_group_created_with_the_init_limit_gets_the_strategys_timeout(groups: list[FakeGroup]) -> None:
    limits = check_limits(None, 1800, "abort", {"init": 300.0})
    groups.append(FakeGroup(315))
    phases = Followed(limits)
    phases.start()
    assert groups[0].set_to == []
    phases.enter(TRAIN)
    phases.restore()
    assert groups[0].set_to == [1815, 1815]


def test_a_groups_shorter_timeout_does_not_preempt_the_guard(groups: list[FakeGroup]) -> None:
    groups.append(FakeGroup(60))
    phases = Followed(LIMITS)
    phases.enter(TRAIN)
    phases.restore()
    assert groups[0].set_to == [115, 60]


def test_a_failure_is_printed_once_and_groups_are_restored_where_possible(
    groups: list[FakeGroup], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups += [FakeGroup(45), FakeGroup(45)]
    phases = Followed(LIMITS)
    phases.enter(TRAIN)

    def fail(timeout_s: float) -> None:
        if timeout_s > 1000:  # after the first group was set, before the second is
            raise RuntimeError("no such back end")
        groups[1].timeout_s = timeout_s

    monkeypatch.setattr(groups[1], "set_timeout", fail)
    phases.enter(CHECKPOINT)
    assert [group.timeout_s for group in groups] == [45, 45]
    phases.enter(TRAIN)
    phases.enter(CHECKPOINT)
    phases.restore()
    assert capsys.readouterr().err.count("no such back end") == 1
    assert [group.timeout_s for group in groups] == [45, 45]


def test_remembered_action_names_are_bounded(groups: list[FakeGroup]) -> None:
    phases = Followed(LIMITS)
    for number in range(5000):
        phases.enter(TRAIN, f"mine {number}")
    assert len(phases._may_begin_phase) == 1000
