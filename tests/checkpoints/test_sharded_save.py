"""Ranks that have parts of a model save one checkpoint together, or none: ranks are threads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_ncclsafe.checkpoints import saving, sharded_save
from lightning_ncclsafe.checkpoints.boundary import Boundary, NotProvenError
from lightning_ncclsafe.checkpoints.candidates import Candidate, savers, why_none, writers
from lightning_ncclsafe.checkpoints.finding import found_in, why_not_whole
from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.checkpoints.saving import Saver
from lightning_ncclsafe.checkpoints.sharded_save import Share, joined, why_not_covered
from lightning_ncclsafe.checkpoints.shards import Chunk, SplitTensor, boxes_of_range
from lightning_ncclsafe.code.this_host import process_space
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.exchange.interface import SharedMemory
from lightning_ncclsafe.settings import CheckpointSettings

# Each rank has a range of these, in a replica of two ranks; seven values are no whole rows.
WEIGHTS = torch.arange(15.0).reshape(5, 3)
HALVES = [(0, 7), (7, 15)]
MOMENTS = WEIGHTS * 10


# Parts of a tensor.


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (4, 1, 3), (2, 3, 2, 2)])
def test_a_flat_range_splits_into_ordered_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    for begin, end in product(range(prod(shape) + 1), repeat=2):
        found: list[int] = []
        for offsets, sizes in boxes_of_range(shape, begin, end):
            assert all(sizes)
            found += whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten().tolist()
        assert found == [*range(begin, end)]


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], ""),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], ""),
        ([((0, 0), (2, 3))], "is not complete: 6 of its 12 values were saved"),
        ([], "is not complete: 0 of its 12 values were saved"),
        # The number of values is right.
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "has shards that overlap"),
        ([((0, 0), (4, 2)), ((2, 1), (2, 2))], "has shards that overlap"),
        ([((0, 0), (5, 3))], "has a shard outside of it"),
        ([((-1, 0), (4, 3))], "has a shard outside of it"),
        ([((0,), (12,))], "has a shard with other dimensions"),
    ],
)
def test_gaps_and_overlaps_between_shards_are_explained(boxes: Any, problem: str) -> None:
    assert why_not_covered((4, 3), boxes) == problem


W = '["state_dict", "w"]'


def part(begin: int, end: int, **more: Any) -> Chunk:
    chunk = Chunk(path=W, shape=(4,), dtype="float32", offsets=(begin,), sizes=(end - begin,), length=9)
    return replace(chunk, **more)


def share(*chunks: Chunk) -> Share:
    return Share(size=9, chunks=chunks)


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ([share(part(0, 2)), Share(error="OSError: no space")], "rank 1: OSError: no space"),
        ([share(part(0, 2)), Share()], "'state_dict.w' is not complete: 2 of its 4 values"),
        ([Share(size=8, chunks=(part(0, 4),))], "rank 0: a shard of .* lies outside of its file"),
        ([share(part(0, 2)), share(part(2, 4, dtype="int8"))], "'state_dict.w' differs between rank 0 and rank 1"),
        ([share(part(0, 4, digest=1)), share(part(0, 4, digest=2))], "differs between rank 0 and rank 1"),
        ([Share()], "no rank saved 'state_dict.w'"),
        ([share(part(0, 4, path="{}"))], "no rank saved"),
    ],
)
def test_file_lists_from_ranks_are_validated(shares: Sequence[Share], problem: str) -> None:
    with pytest.raises(NotProvenError, match=problem):
        joined(dict(enumerate(shares)), [W])


def test_one_replica_of_each_shard_is_used() -> None:
    (entry,) = joined({rank: share(part(0, 4)) for rank in (2, 5)}, [])
    assert [chunk.file for chunk in entry.chunks] == ["__2_0.distcp"]


# Who saves.


def able(rank: int, shard: str, step: int = 5, **more: Any) -> Candidate:
    return Candidate(rank=rank, step=step, shard=shard, **more)


@pytest.mark.parametrize(
    ("candidates", "who"),
    [
        ([able(0, "a"), able(1, "b")], [0, 1]),
        ([able(0, "a"), able(1, "b", 6)], []),
        ([able(0, "a")], []),
        ([able(0, "a"), Candidate(rank=1, why="in the middle of a step")], []),
        # Two replicas, of which each lacks a rank.
        ([able(0, "a"), able(3, "b")], [0, 3]),
        # One is a step ahead of the other: the newest step of which there is everything.
        ([able(0, "a", 6), able(1, "b", 5), able(2, "a", 5), able(3, "b", 5)], [1, 2]),
        ([able(0, "a", raised=True), able(1, "b"), able(2, "a"), able(3, "b")], [1, 2]),
    ],
)
def test_each_shard_of_one_step_has_one_saver(candidates: Sequence[Candidate], who: list[int]) -> None:
    assert writers(savers(candidates, {"a", "b"})) == who


def test_the_message_names_the_ranks_at_fault() -> None:
    parts = ["a", "b", "a", "b"]
    assert why_none([able(0, "a"), able(2, "a")], parts) == (
        "ranks 0, 2: has a shard of the model, of step 5; "
        "ranks 1, 3: no answer, and no other rank has its shard of the model"
    )
    assert why_none([able(0, "a"), able(1, "b", 6), able(2, "a", why="torn")], parts) == (
        "rank 0: has a shard of the model, of step 5; rank 1: has a shard of the model, of step 6; "
        "rank 2: torn; rank 3: no answer"
    )


# Saving together.


class Shard:
    """A rank's part, as it is read of a model."""

    model_key, why_unread = "state_dict", ""

    def __init__(self, half: int, *, common: float = 3.0) -> None:
        self.begin, self.end = HALVES[half]
        self.layout = f"half {half}"
        self.common = common

    def split(self, whole: torch.Tensor) -> SplitTensor:
        return SplitTensor(whole.shape, self.begin, whole.flatten()[self.begin : self.end])

    def weights(self) -> dict[str, Any]:
        return {"w": self.split(WEIGHTS), "running": torch.tensor([1.0, 2.0])}

    def optimizer_state(self) -> dict[str, Any]:
        state = {"w": {"step": torch.tensor(self.common), "moment": self.split(MOMENTS)}}
        return {"state": state, "param_groups": [{"lr": 0.5, "params": ["w"]}]}


class Noted:
    """A ledger that has one boundary."""

    is_on_device = is_in_step = False

    def __init__(self, step: int = 5, *, why_then: str = "") -> None:
        self.why_then = why_then
        self.boundary = Boundary(
            step=step, epoch=1, counts=[], batches_that_stepped=step, schedulers=[], groups=[], is_over=True,
            position={"seed": step},
        )  # fmt: skip

    def newest(self) -> Boundary:
        return self.boundary

    def check(self, boundary: Boundary) -> None:
        if self.why_then:
            raise NotProvenError(self.why_then)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Lightning puts into a checkpoint is no matter here."""

    def contents(trainer: Any, ledger: Any, boundary: Boundary, weights: Any, state: Any) -> dict[str, Any]:
        return {"state_dict": weights(), "optimizer_states": [state()], "global_step": boundary.step}

    monkeypatch.setattr(saving, "contents", contents)


class Job:
    """Ranks that each have half of the model, every two a replica of it; those without a ledger are dead."""

    def __init__(self, folder: Path, ledgers: Mapping[int, Noted], world_size: int = 2, **settings: Any) -> None:
        shared = SharedMemory()
        self.said: list[str] = []
        self.savers = {}
        for rank in range(world_size):
            saver = Saver(
                SimpleNamespace(),  # type: ignore[arg-type]
                CheckpointSettings(dirpath=folder, run="run"),
                ledgers.get(rank, Noted()),  # type: ignore[arg-type]
                weights=dict,
                rank=rank,
                world_size=world_size,
                exchange=MemoryExchange(shared),
                shard=settings.get(f"shard_{rank}", Shard(rank % 2)),
                last_path=lambda: "last.ckpt",
                say=self.said.append,
            )
            if rank in ledgers:
                self.savers[rank] = saver

    def save(self) -> str:
        def act(saver: Saver) -> None:
            saver.begin("dead-rank", budget_s=5.0)
            saver.wait()

        with ThreadPoolExecutor(len(self.savers)) as threads:
            for done in [threads.submit(act, saver) for saver in self.savers.values()]:
                done.result(30)
        (line,) = self.said
        return line


def loaded(path: Path) -> dict[str, Any]:
    """As PyTorch reads it, into tensors that are there."""
    state: dict[str, Any] = {
        "state_dict": {"w": torch.zeros(5, 3), "running": torch.zeros(2)},
        "optimizer_0": {
            "state": {"w": {"step": torch.tensor(0.0), "moment": torch.zeros(5, 3)}},
            "param_groups": [{"lr": 0.0, "params": []}],
        },
    }
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def the_one_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def assert_is_whole(path: Path) -> dict[str, Any]:
    assert why_not_whole(path) == ""
    state = loaded(path)
    assert torch.equal(state["state_dict"]["w"], WEIGHTS)
    assert state["state_dict"]["running"].tolist() == [1.0, 2.0]
    optimizer = state["optimizer_0"]
    assert torch.equal(optimizer["state"]["w"]["moment"], MOMENTS) and optimizer["state"]["w"]["step"] == 3
    assert optimizer["param_groups"] == [{"lr": 0.5, "params": ["w"]}]
    rest: dict[str, Any] = torch.load(path / "meta.pt", weights_only=True)
    assert rest["global_step"] == 5
    return rest


def test_ranks_together_save_a_checkpoint_pytorch_can_read(tmp_path: Path) -> None:
    line = Job(tmp_path, {0: Noted(), 1: Noted()}).save()
    path = the_one_in(tmp_path)
    assert line.startswith("ranks 0-1 saved the state after step 5 together in ") and line.endswith(str(path))
    assert path.name == "just-in-time-epoch=1-step=5.ckpt"
    rest = assert_is_whole(path)
    assert rest[KEY]["positions"] == {0: {"seed": 5}, 1: {"seed": 5}}
    assert sorted(rest[KEY]["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_another_replica_replaces_a_dead_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, {0: Noted(), 2: Noted(), 3: Noted()}, world_size=4)
    assert job.save().startswith("ranks 0, 3 saved the state after step 5")
    rest = assert_is_whole(the_one_in(tmp_path))
    assert sorted(rest[KEY]["files"]) == [".metadata", "__0_0.distcp", "__3_0.distcp"]
    assert rest[KEY]["positions"] == {0: {"seed": 5}, 1: None, 2: {"seed": 5}, 3: {"seed": 5}}


def nothing_of(folder: Path) -> bool:
    return not folder.exists() or not [*folder.iterdir()]


def test_a_lost_shard_prevents_the_save(tmp_path: Path) -> None:
    assert Job(tmp_path, {0: Noted()}).save() == (
        "no checkpoint was saved: rank 0: has a shard of the model, of step 5; "
        "rank 1: no answer, and no other rank has its shard of the model; the last checkpoint is last.ckpt"
    )
    assert nothing_of(tmp_path)


def test_a_rank_a_step_ahead_prevents_the_save(tmp_path: Path) -> None:
    assert Job(tmp_path, {0: Noted(5), 1: Noted(6)}).save() == (
        "no checkpoint was saved: rank 0: has a shard of the model, of step 5; "
        "rank 1: has a shard of the model, of step 6; the last checkpoint is last.ckpt"
    )
    assert nothing_of(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_change_during_the_save_prevent_it(rank: int, tmp_path: Path) -> None:
    ledgers = {0: Noted(), 1: Noted()} | {rank: Noted(why_then="training continued meanwhile")}
    line = Job(tmp_path, ledgers).save()
    assert line.startswith("no checkpoint of step 5 was saved: ") and line.endswith(
        "; the last checkpoint is last.ckpt"
    )
    assert "training continued meanwhile" in line and (rank == 0 or "rank 1: " in line)
    assert nothing_of(tmp_path)


def test_a_file_that_another_rank_begins_during_the_removal_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, removed = shutil.rmtree, list[Path]()

    def disturbed(path: Path, **options: Any) -> None:
        removed.append(path)
        if len(removed) > 1:
            remove(path, **options)

    monkeypatch.setattr(sharded_save.shutil, "rmtree", disturbed)
    Job(tmp_path, {0: Noted(why_then="training continued meanwhile"), 1: Noted()}).save()
    assert nothing_of(tmp_path) and len(removed) == 2


def test_differing_common_state_prevents_the_save(tmp_path: Path) -> None:
    line = Job(tmp_path, {0: Noted(), 1: Noted()}, shard_1=Shard(1, common=4.0)).save()
    assert "'optimizer_0.state.w.step' differs between rank 0 and rank 1" in line
    assert nothing_of(tmp_path)


def test_a_shard_smaller_than_reported_prevents_the_save(tmp_path: Path) -> None:
    short = Shard(1)
    short.begin = 8
    line = Job(tmp_path, {0: Noted(), 1: Noted()}, shard_1=short).save()
    assert "'state_dict.w' is not complete: 14 of its 15 values were saved" in line
    assert nothing_of(tmp_path)


@pytest.mark.parametrize("seen_by", ["the rank that has written it", "the first rank"])
def test_a_file_lost_by_storage_prevents_the_save(
    seen_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sharded_save.write_synced

    def lose(path: Path, act: Any) -> int:
        size = write(path, act)
        if path.name == ("__1_0.distcp" if seen_by == "the rank that has written it" else ".metadata"):
            lost = path.with_name("__1_0.distcp")
            lost.write_bytes(lost.read_bytes()[:-1])
        return size

    monkeypatch.setattr(sharded_save, "write_synced", lose)
    line = Job(tmp_path, {0: Noted(), 1: Noted()}).save()
    assert ("rank 1: OSError: " in line) == (seen_by == "the rank that has written it"), line
    assert "were written, " in line
    assert nothing_of(tmp_path)


def test_an_unwritable_folder_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    path.write_text("mine")
    assert Job(path, {0: Noted(), 1: Noted()}).save().startswith("no checkpoint of step 5 was saved: FileExistsError: ")
    assert path.read_text() == "mine"


def test_old_checkpoints_and_dead_attempts_are_removed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = tmp_path / f".just-in-time@{process_space()}@{process.pid}@00ff.ncclsafe-partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half of it")
    for step in (3, 4, 5):
        Job(tmp_path, {0: Noted(step), 1: Noted(step)}).save()
        os.utime(tmp_path / f"just-in-time-epoch=1-step={step}.ckpt", (step, step))
    assert sorted(os.listdir(tmp_path)) == [f"just-in-time-epoch=1-step={step}.ckpt" for step in (4, 5)]


def test_a_checkpoint_of_the_same_name_is_not_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        Job(tmp_path, {0: Noted(), 1: Noted()}).save()
    names = ["just-in-time-epoch=1-step=5-v1.ckpt", "just-in-time-epoch=1-step=5.ckpt"]
    assert sorted(os.listdir(tmp_path)) == names
    for name in names:
        assert_is_whole(tmp_path / name)


def damages() -> Iterator[Any]:
    yield pytest.param("__1_0.distcp", lambda path: path.write_bytes(path.read_bytes()[:-1]), id="truncated")
    yield pytest.param("__0_0.distcp", Path.unlink, id="a missing shard")
    yield pytest.param("meta.pt", lambda path: path.write_bytes(path.read_bytes()[:-100]), id="truncated metadata")
    yield pytest.param(".metadata", Path.unlink, id="no metadata")


@pytest.mark.parametrize(("name", "damage"), damages())
def test_a_damaged_checkpoint_is_skipped(name: str, damage: Any, tmp_path: Path) -> None:
    Job(tmp_path, {0: Noted(), 1: Noted()}).save()
    path = the_one_in(tmp_path)
    assert [one.path for one in found_in([tmp_path]).candidates] == [str(path)]
    damage(path / name)
    found = found_in([tmp_path])
    assert found.candidates == () and str(path) in found.lines[0]


def test_an_invalid_state_path_is_refused(tmp_path: Path) -> None:
    """What is sent between ranks is read as plain data, and an invalid path is refused."""
    for path in ("[]", "[[]]", "[1.5]", json.dumps({"a": 1})):
        with pytest.raises(NotProvenError, match="is not a path of an entry"):
            joined({0: share(part(0, 4, path=path))}, [])
