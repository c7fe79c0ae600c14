"""Which checkpoint a start goes on from: the newest that is whole, of this model, and seen alike by all ranks."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_ncclsafe.checkpoints.finding import (
    CheckpointList,
    NoCommonCheckpointError,
    SeenCheckpoint,
    agree_on_newest,
    chosen,
    found_in,
    why_not_whole,
    why_unfit,
)
from lightning_ncclsafe.exchange import MemoryExchange, SharedMemory

NAMES = ("net.weight", "net.bias")


def save(path: Path, *, names: tuple[str, ...] = NAMES, second: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"state_dict": {name: torch.ones(100) for name in names}, "lr_schedulers": [], "epoch": 1}
    torch.save(content, path)
    os.utime(path, (1e9 + second, 1e9 + second))
    return path


def cut(path: Path, share: float = 0.5) -> Path:
    os.truncate(path, int(path.stat().st_size * share))
    os.utime(path, (2e9, 2e9))
    return path


def paths(seen: CheckpointList) -> list[str]:
    return [Path(one.path).name for one in seen.candidates]


def test_the_newest_comes_first_across_folders(tmp_path: Path) -> None:
    save(tmp_path / "ours" / "a.ckpt", second=1)
    save(tmp_path / "theirs" / "b.ckpt", second=3)
    save(tmp_path / "ours" / "c.ckpt", second=2)
    assert paths(found_in([tmp_path / "ours", tmp_path / "theirs", tmp_path / "ours"])) == [
        "b.ckpt",
        "c.ckpt",
        "a.ckpt",
    ]


def test_a_missing_folder_is_not_an_error(tmp_path: Path) -> None:
    assert found_in([tmp_path / "none"]) == CheckpointList()


def test_incomplete_files_and_other_files_are_ignored(tmp_path: Path) -> None:
    save(tmp_path / ".1234.ncclsafe-partial.ckpt")
    (tmp_path / "notes.txt").write_text("x")
    assert found_in([tmp_path]) == CheckpointList()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_skipped_with_a_message(tmp_path: Path, share: float) -> None:
    save(tmp_path / "good.ckpt")
    bad = cut(save(tmp_path / "bad.ckpt"), share)
    seen = found_in([tmp_path])
    assert paths(seen) == ["good.ckpt"]
    (line,) = seen.lines
    assert line.startswith(f"{bad} is skipped: it is truncated or damaged")


def test_an_unrelated_file_is_not_a_pytorch_checkpoint(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "zip.ckpt", "w") as file:
        file.writestr("readme", "x")
    assert why_not_whole(tmp_path / "zip.ckpt") == "it is not a PyTorch checkpoint"
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert why_not_whole(tmp_path / "pipe.ckpt") == "it is not a file"


def test_a_sharded_checkpoint_needs_its_index_and_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "sharded.ckpt"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"x")
    assert why_not_whole(folder) == "it lacks .metadata and meta.pt, as if its writer was interrupted"
    (folder / ".metadata").write_bytes(b"x")
    (folder / "meta.pt").write_bytes(b"x")
    assert why_not_whole(folder) == "it is truncated or damaged (1 bytes)"
    torch.save({"global_step": 1}, folder / "meta.pt")
    assert why_not_whole(folder) == ""
    assert paths(found_in([tmp_path])) == ["sharded.ckpt"]


def test_a_mismatch_with_the_model_is_explained(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", names=("net.weight", "head.weight"))
    model = {name: torch.ones(100) for name in NAMES}
    assert why_unfit(path, model) == "it is of another model: it lacks 'net.bias', it has 'head.weight'"
    assert why_unfit(path, None) == ""
    assert why_unfit(save(path), model) == ""
    larger = model | {"net.bias": torch.ones(200)}
    assert why_unfit(path, larger) == "it is of another model: the shape differs for 'net.bias'"


@pytest.mark.parametrize("is_split", [False, True])
def test_a_weights_only_checkpoint_is_skipped(is_split: bool, tmp_path: Path) -> None:
    """``ModelCheckpoint(save_weights_only=True)``: each start would end with an error from Lightning."""
    path = tmp_path / "best.ckpt"
    if is_split:
        path.mkdir()
    torch.save({"state_dict": {name: torch.ones(100) for name in NAMES}}, path / "meta.pt" if is_split else path)
    why = "it has weights only (save_weights_only=True), so training cannot resume from it"
    assert why_unfit(path, {name: torch.ones(100) for name in NAMES}) == why_unfit(path, None) == why


class Sly:
    """Its pickle would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_inspecting_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    odd = {"more": Sly(tmp_path / "run"), "where": tmp_path, "named": [Sly(tmp_path / "too")], "why": OSError("x")}
    torch.save({"state_dict": {"x": parameter}, "lr_schedulers": [], **odd}, path)
    found_in([tmp_path])
    assert why_unfit(path, {"x": torch.ones(2, 3)}) == ""
    assert why_unfit(path, {"x": torch.ones(2)}) == "it is of another model: the shape differs for 'x'"
    assert [*tmp_path.iterdir()] == [path]


def seen(*names: str, size: int = 1) -> CheckpointList:
    return CheckpointList(
        candidates=tuple(SeenCheckpoint(path=name, size_bytes=size, modified_ns=ord(name[0])) for name in names)
    )


def test_the_newest_checkpoint_visible_to_all_ranks_is_chosen() -> None:
    choice = chosen([seen("b", "a"), seen("c", "b", "a")], 2)
    assert choice.path == "b"
    assert choice.lines == ("c is skipped: rank 0 does not see all of it",)


def test_a_checkpoint_that_differs_between_ranks_is_skipped() -> None:
    choice = chosen(
        [seen("b", "a"), CheckpointList(candidates=(*seen("b", size=2).candidates, *seen("a").candidates))], 2
    )
    assert choice.path == "a"


def test_no_checkpoint_at_the_first_start_is_not_an_error() -> None:
    choice = chosen([CheckpointList(), CheckpointList()], 2)
    assert (choice.path, choice.error, choice.lines) == ("", "", ())


def test_checkpoints_missing_on_some_ranks_are_an_error() -> None:
    choice = chosen([CheckpointList(), seen("a"), CheckpointList()], 3)
    assert choice.path == "" and "Only some ranks see these checkpoints: a." in choice.error


def test_missing_ranks_are_an_error() -> None:
    assert chosen([seen("a")], 3).error.startswith("2 of 3 ranks did not report")


def test_an_unfit_checkpoint_is_skipped() -> None:
    choice = chosen([seen("b", "a")], 1, lambda path: "it is of another model" if path.name == "b" else "")
    assert (choice.path, choice.lines) == ("a", ("b is skipped: it is of another model",))


def agreed(folders: list[Path], **settings: float) -> tuple[list[str], list[str]]:
    """What each rank goes on from, each with a folder of its own, and what is printed."""
    shared, said = SharedMemory(), list[str]()

    def agree(rank: int) -> str:
        exchange = MemoryExchange(shared)
        world_size, deadline_s = len(folders), settings.get("deadline_s", 20.0)
        try:
            return agree_on_newest(
                [folders[rank]], exchange, rank=rank, world_size=world_size, deadline_s=deadline_s, say=said.append
            )
        except NoCommonCheckpointError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(len(folders)) as pool:
        return [*pool.map(agree, range(len(folders)))], said


def test_all_ranks_choose_the_same_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", second=1)
    newest = save(tmp_path / "b.ckpt", second=2)
    cut(save(tmp_path / "c.ckpt"))
    found, said = agreed([tmp_path] * 3)
    assert found == [str(newest)] * 3
    assert len(said) == 1 and "c.ckpt is skipped" in said[0]


def test_all_ranks_fail_if_only_one_host_has_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "one" / "a.ckpt")
    found, _ = agreed([tmp_path / "none", tmp_path / "one"])
    assert len({*found}) == 1 and found[0].startswith("error: Only some ranks see these checkpoints")
