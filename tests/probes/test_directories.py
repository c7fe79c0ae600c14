"""Directories tried out by real processes: what is measured, what is wrong with them, and that nothing is left."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.probes import directories as module
from lightning_ncclsafe.probes import directory_trial
from lightning_ncclsafe.probes.directories import try_directories
from lightning_ncclsafe.probes.directory_trial import try_reading, try_writing

LONG_S = 20.0


def later() -> float:
    return time.monotonic() + LONG_S


def one(role: str, path: Path) -> DirectoryFacts:
    (facts,) = try_directories({role: str(path)}, LONG_S)
    return facts


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_writable_directory_is_measured(tmp_path: Path) -> None:
    facts = one("logs", tmp_path)
    assert (facts.role, facts.path, facts.problem) == ("logs", str(tmp_path), "")
    assert facts.append_s and facts.append_worst_s and facts.fsync_s
    assert 0 < facts.append_s <= facts.append_worst_s < 10
    assert facts.filesystem and facts.free_bytes and facts.read_s is None
    assert everything_in(tmp_path) == []


def test_a_missing_directory_is_not_created_and_its_parent_tried(tmp_path: Path) -> None:
    facts = one("checkpoints", tmp_path / "runs" / "7")
    assert facts.path == str(tmp_path / "runs" / "7")
    assert facts.append_s and facts.problem == ""
    assert everything_in(tmp_path) == []


def test_a_data_directory_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "big").write_bytes(bytes(100_000))
    (tmp_path / "small").write_bytes(b"x")
    before = {path: path.stat().st_mtime_ns for path in everything_in(tmp_path)}
    facts = one("data", tmp_path)
    assert facts.read_s and 0 < facts.read_s < 10
    assert (facts.append_s, facts.fsync_s, facts.problem) == (None, None, "")
    assert {path: path.stat().st_mtime_ns for path in everything_in(tmp_path)} == before


@pytest.mark.parametrize("path", ["s3://bucket/logs", "gs://bucket", "memory://x"])
def test_remote_paths_are_not_tried(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "filesystem_of", lambda _: pytest.fail("looked"))
    monkeypatch.setattr(os.path, "abspath", lambda _: pytest.fail("looked"))
    assert try_directories({"logs": path}) == (
        DirectoryFacts(role="logs", path=path, problem="is not a local path; not tried"),
    )


def test_the_callers_order_is_kept(tmp_path: Path) -> None:
    given = {"data": str(tmp_path), "logs": "s3://b", "checkpoints": str(tmp_path)}
    assert [facts.role for facts in try_directories(given, LONG_S)] == ["data", "logs", "checkpoints"]


def test_a_hanging_directory_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial opens a pipe without a writer, as a dead mount waits for its server; the other trial continues."""
    pipe, hanging = tmp_path / "pipe", tmp_path / "hanging.py"
    os.mkfifo(pipe)
    real = module._PROGRAM
    hanging.write_text(
        f"import runpy, sys\nif 'dead' in sys.argv[2]:\n    open({str(pipe)!r})\n"
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(module, "_PROGRAM", hanging)
    begin = time.monotonic()
    dead, alive = try_directories({"logs": str(tmp_path / "dead"), "checkpoints": str(tmp_path)}, 5.0)
    assert time.monotonic() - begin < 5.0 + LONG_S
    assert dead.problem == "no answer within 5 s" and dead.append_s is None and dead.filesystem
    assert alive.problem == "" and alive.append_s


def test_a_broken_trial_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("print('{')")
    monkeypatch.setattr(module, "_PROGRAM", tmp_path / "broken.py")
    assert one("logs", tmp_path).problem == "the trial exited without an answer"


def test_the_program_imports_little_and_from_the_standard_library_only(tmp_path: Path) -> None:
    command = [*module._command("logs", str(tmp_path), 0.1)]
    command[1:1] = ["-X", "importtime"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert {name.partition(".")[0] for name in imported[1:]} <= {*sys.stdlib_module_names, "__main__"}
    # It must start fast: asyncio alone, for example, imports as many again.
    assert len(imported) < 100


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_unwritable_directory_has_a_reason(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise error(number)

    monkeypatch.setattr(os, "open", refuse)
    assert try_writing(str(tmp_path), later())["problem"] == os.strerror(number)
    above = try_writing(str(tmp_path / "runs"), later())
    assert above["problem"] == f"{os.strerror(number)} in {tmp_path}" and above["free_bytes"] >= 0


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_failed_write_leaves_no_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        assert everything_in(tmp_path) == [], "it could be killed here"
        raise error(errno.ENOSPC)

    monkeypatch.setattr(os, name, full)
    assert try_writing(str(tmp_path), later())["problem"] == os.strerror(errno.ENOSPC)
    assert everything_in(tmp_path) == []


def test_a_trial_makes_twenty_appends_each_with_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, synced = [], []
    write, fsync, opened = os.write, os.fsync, []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda *a: opened.append(a[1]) or real_open(*a))
    monkeypatch.setattr(os, "write", lambda file, data: written.append(len(data)) or write(file, data))
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(len(written)) or fsync(file))
    try_writing(str(tmp_path), later())
    assert written == [4096] * 20 and synced == [*range(1, 21)]
    assert opened[0] & os.O_APPEND and opened[0] & os.O_EXCL


def test_slow_storage_is_measured_with_fewer_appends(tmp_path: Path) -> None:
    assert try_writing(str(tmp_path), time.monotonic() - 1)["append_s"] > 0


def test_a_data_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "all.h5").write_bytes(bytes(10_000))
    assert try_reading(str(tmp_path / "all.h5"), later())["read_s"] > 0


def test_missing_data_has_a_reason(tmp_path: Path) -> None:
    assert try_reading(str(tmp_path / "none"), later())["problem"] == os.strerror(errno.ENOENT)


def test_some_of_many_files_are_read_at_random_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / str(number)).write_bytes(bytes(10_000))
    places, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: places.append((size, at)) or pread(file, size, at))
    assert try_reading(str(tmp_path), later())["read_s"] > 0
    assert len(places) == 8 and {size for size, _ in places} == {4096}
    assert len({at for _, at in places}) > 1 and all(0 <= at <= 10_000 - 4096 for _, at in places)


def test_listing_is_bounded(tmp_path: Path) -> None:
    for number in range(210):
        (tmp_path / f"folder{number}").mkdir()
        (tmp_path / f"folder{number}" / "file").touch()
    assert len(list(directory_trial._files(str(tmp_path)))) == 0
    for number in range(210):
        (tmp_path / "folder0" / str(number)).touch()
    assert len(list(directory_trial._files(str(tmp_path / "folder0")))) == 200


def test_pipes_dangling_links_and_empty_folders_are_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "round").symlink_to(tmp_path)
    found = try_reading(str(tmp_path), later())
    assert "read_s" not in found and "problem" not in found


def test_a_file_system_without_inodes_reports_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = os.statvfs(tmp_path)

    class Told:
        f_bavail, f_frsize, f_files, f_favail = 7, 4096, 0, 0

    assert "free_inodes" in try_writing(str(tmp_path), later()) or told.f_files == 0
    monkeypatch.setattr(os, "statvfs", lambda _: Told)
    found = try_writing(str(tmp_path), later())
    assert found["free_bytes"] == 7 * 4096 and "free_inodes" not in found


def test_a_missing_interpreter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(OSError, match=r"sys\.executable is empty"):
        try_directories({"logs": str(tmp_path)})
