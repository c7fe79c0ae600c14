"""What a rank has written of its position is there for others after its end, and whole, whenever that came."""

import json
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from polling import until

from lightning_ncclsafe.checkpoints import position_file
from lightning_ncclsafe.checkpoints.position_file import PositionFile, packed, read_position, unpacked
from lightning_ncclsafe.checkpoints.resuming import Resuming
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.probes.data.random_state import saved_states
from lightning_ncclsafe.settings import CheckpointSettings


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PositionFile]:
    monkeypatch.setattr(position_file.tempfile, "tempdir", str(tmp_path))
    kept = PositionFile(3)
    yield kept
    kept.close()
    assert not [*tmp_path.iterdir()]


def position(batches: int) -> dict[str, Any]:
    return {"random": saved_states(), "batches": batches, "loaders": [{"digest": 7, "first": None, "generators": []}]}


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_unpacking_returns_what_was_packed() -> None:
    told = position(4) | {"none": None, "text": "x", "share": 0.5, "pair": (1, "a")}
    assert is_same(unpacked(packed(told)), told)


@pytest.mark.parametrize("odd", [object(), {1: 2}, {"x": torch.ones(2, 2)}, {"x": {3}}, {"x": (-1,) * 100}])
def test_data_other_than_plain_values_is_refused(odd: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        packed({"odd": odd})


def test_the_latest_position_is_read(kept: PositionFile) -> None:
    assert read_position(kept.path, 0) is None
    for batches in range(5):
        kept.write(position(batches) | {"step": batches // 2})
        read = read_position(kept.path, batches // 2)
        assert read is not None and read["batches"] == batches


def test_what_cannot_be_written_is_no_position(kept: PositionFile) -> None:
    kept.write(position(1) | {"step": 1})
    for odd in (object(), "x" * (1 << 19)):
        kept.write({"odd": odd, "step": 2})
        assert read_position(kept.path, 2) is None
    assert read_position(kept.path, 1) is None, "its place was taken"


@pytest.mark.parametrize("at", [0, 5, 13, 20, 400, 5000])
def test_a_torn_write_leaves_the_previous_position_intact(kept: PositionFile, at: int) -> None:
    for batches in (1, 2):
        kept.write(position(batches) | {"step": 0})
    start = 2 % 2 * position_file._ROOM
    kept._memory[start + at] ^= 0xFF
    read = read_position(kept.path, 0)
    # The number alone is not what the checksum is of: then it is another one of the same content.
    assert read is not None and read["batches"] in ((1, 2) if at == 0 or at == 5 else (1,))


def test_the_position_survives_a_killed_rank(kept: PositionFile) -> None:
    pid = os.fork()
    if not pid:
        for batches in range(1 << 30):
            kept.write({"batches": batches, "random": saved_states(), "step": 0})
    try:
        read = until(lambda: read_position(kept.path, 0))
        assert read is not None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    after = read_position(kept.path, 0)
    assert after is not None and after["batches"] >= read["batches"]


def test_other_files_are_not_read_as_positions(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert read_position(path, 0) is None
    os.mkfifo(path)
    assert read_position(path, 0) is None
    path.unlink()
    for body in (b"", b"x" * 100, struct.pack("<II", 1, 1 << 30), packed([1]), packed({"\0tensor": ["float16", 9]})):
        header = position_file._HEADER.pack(1, len(body), position_file.zlib.crc32(body))
        path.write_bytes(header + body)
        assert read_position(path, 0) is None, json.dumps(str(body))


def test_a_position_counts_only_for_its_own_step(kept: PositionFile) -> None:
    def start(rank: int) -> Resuming:
        trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), _checkpoint_connector=None)
        settings = CheckpointSettings(dirpath=kept.path.parent)
        return Resuming(trainer, settings, MemoryExchange(), rank=rank, world_size=2, local_ranks=range(2))

    one = start(0)
    one._files = {1: kept.path}
    kept.write(position(6) | {"step": 2})
    found = one.positions_in_files([1, 5], 2)
    assert [*found] == [1] and found[1]["batches"] == 6 and "step" not in found[1]
    assert one.positions_in_files([1], 3) == {}
    assert one._left_behind is not None
    one._left_behind.close()


def test_stale_position_files_are_removed(kept: PositionFile, tmp_path: Path) -> None:
    names = {"old": (1 << 22) + 1, "mine": os.getpid()}
    paths = {name: tmp_path / f"{position_file._PREFIX}{pid}-0-{name}" for name, pid in names.items()}
    recent = tmp_path / f"{position_file._PREFIX}{names['old']}-1-recent"
    for path in (*paths.values(), recent):
        path.touch()
    for path in paths.values():
        os.utime(path, (1e9, 1e9))
    PositionFile(0).close()
    assert not paths["old"].exists() and paths["mine"].exists() and recent.exists()
    for path in (paths["mine"], recent):
        path.unlink()
