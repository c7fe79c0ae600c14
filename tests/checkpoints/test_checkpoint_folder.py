"""Checkpoints in a folder: whole or not at all, none written over, as many kept as were asked for."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from lightning_ncclsafe.checkpoints.folder import KEY, CheckpointFolder, own_part, read_back
from lightning_ncclsafe.code.this_host import process_space

MINE = "mine"


def folder(path: Path, keep: int = 2) -> CheckpointFolder:
    return CheckpointFolder(path, keep=keep, run=MINE)


def writes(value: Any = 0, run: str = MINE) -> Callable[[BinaryIO], None]:
    return lambda file: torch.save({"value": value, KEY: {"run": run}, "weights": torch.ones(100)}, file)


def nothing() -> None:
    pass


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def value_of(path: Path) -> Any:
    return torch.load(path, weights_only=True)["value"]


def test_a_write_leaves_only_the_named_checkpoint(tmp_path: Path) -> None:
    path = folder(tmp_path / "new").write(3, 41, writes(7), nothing)
    assert path.name == "just-in-time-epoch=3-step=41.ckpt" and names(path.parent) == [path.name]
    assert value_of(path) == 7


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    first = folder(tmp_path).write(0, 1, writes(1), nothing)
    second = folder(tmp_path).write(0, 1, writes(2), nothing)
    assert second.name == "just-in-time-epoch=0-step=1-v1.ckpt"
    assert (value_of(first), value_of(second)) == (1, 2)


def test_concurrent_writes_both_succeed(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    paths: list[Path] = []

    def write(value: int) -> None:
        paths.append(folder(tmp_path).write(0, 1, writes(value), lambda: [barrier.wait(10)][0] and None))

    threads = [threading.Thread(target=write, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {value_of(path) for path in paths} == {1, 2} and len(names(tmp_path)) == 2


@pytest.mark.parametrize("breaks", ["while it is written", "before it has its name"])
def test_a_failed_write_leaves_the_earlier_checkpoint(breaks: str, tmp_path: Path) -> None:
    before = folder(tmp_path).write(0, 1, writes(1), nothing)

    def fail(*args: Any) -> None:
        if args:
            args[0].write(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        if breaks == "while it is written":
            folder(tmp_path).write(0, 2, fail, nothing)
        else:
            folder(tmp_path).write(0, 2, writes(2), fail)
    assert names(tmp_path) == [before.name] and value_of(before) == 1


def test_only_old_checkpoints_of_this_run_are_pruned(tmp_path: Path) -> None:
    other = folder(tmp_path).write(0, 0, writes(run="another"), nothing)
    (tmp_path / "just-in-time-epoch=0-step=9.ckpt").write_bytes(b"what nobody can read")
    (tmp_path / "best.ckpt").write_bytes(b"a ModelCheckpoint's")
    kept = [folder(tmp_path).write(0, step, writes(step), nothing) for step in (1, 2, 3)][1:]
    assert set(names(tmp_path)) == {
        other.name,
        "best.ckpt",
        "just-in-time-epoch=0-step=9.ckpt",
        *(path.name for path in kept),
    }


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, timeout=30)
    space, pid = process_space(), int(gone.stdout)
    left = tmp_path / f".just-in-time@{space}@{pid}@abc.ncclsafe-partial"
    writing = tmp_path / f".just-in-time@{space}@{os.getppid()}@abc.ncclsafe-partial"
    # Of a container that has the name of its host, and process ids of its own.
    contained = tmp_path / f".just-in-time@{space}1@{pid}@abc.ncclsafe-partial"
    elsewhere = tmp_path / ".just-in-time@elsewhere@1@abc.ncclsafe-partial"
    long_ago = tmp_path / ".just-in-time@elsewhere@1@def.ncclsafe-partial"
    for path in (left, writing, contained, elsewhere, long_ago):
        path.touch()
    os.utime(long_ago, (1e9, 1e9))
    folder(tmp_path).write(0, 1, writes(), nothing)
    assert [path.exists() for path in (left, writing, contained, elsewhere, long_ago)] == [
        False,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("damage", ["shorter", "overwritten"])
def test_lost_or_corrupt_bytes_are_detected(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "written.ckpt"
    torch.save({"weights": torch.ones(1000)}, path)
    size = path.stat().st_size
    read_back(path, size)
    with path.open("r+b") as file:
        if damage == "shorter":
            file.truncate(size - 100)
        else:
            file.seek(0)
            file.write(bytes(200))
    with pytest.raises(OSError, match=r"are there|cannot be read"):
        read_back(path, size)


class Told:
    """Its pickle would print."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return print, ("run",)


def test_untrusted_objects_are_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hyperparameters may be objects of any class: our part is still read, and no code of theirs runs."""
    torch.save({KEY: {"run": MINE, "odd": Told()}, "code": Told(), "hparams": tmp_path}, path := tmp_path / "code.ckpt")
    part = own_part(path)
    assert part["run"] == MINE and capsys.readouterr().out == ""


def test_checkpoints_with_arbitrary_objects_are_pruned_too(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        torch.save({KEY: {"run": MINE}, "hyper_parameters": {"data_dir": tmp_path}}, file)

    kept = [folder(tmp_path).write(0, step, write, nothing) for step in (1, 2, 3)][1:]
    assert set(names(tmp_path)) == {path.name for path in kept}
