"""``ncclsafe logs recover``: which folders are meant by each kind of directory, what is said, and the exit codes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.cli import main
from lightning_ncclsafe.loggers.segments import StagedFrame, encode
from lightning_ncclsafe.loggers.staging import SCHEMA, Manifest, default_staging_dir, make_staging
from lightning_ncclsafe.loggers.store import Store

Recover = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default staging_dir, which is not that of this machine."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    default_staging_dir().mkdir(parents=True)
    return default_staging_dir()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def recover(capsys: pytest.CaptureFixture[str]) -> Recover:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["logs", "recover", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def left(staging: Path, version: Path | str, name: str = "one", **said: Any) -> Path:
    """Staging of one point that a process has left behind, for ``log.txt`` in a directory."""
    made = Manifest(logger="CSVLogger", kind="files", destination=str(version), root="", identity="run/7", pid=42)
    folder = staging / name
    folder.mkdir(mode=0o700, parents=True)
    (folder / "manifest.json").write_text(json.dumps({"schema": SCHEMA, **asdict(made), **said}))
    Store(folder).append([StagedFrame(kind="append", file="log.txt", body=name.encode(), points=1)])
    return folder


def test_one_staging_folder_is_recovered(default: Path, logs: Path, recover: Recover) -> None:
    folder, other = left(default, logs), left(default, logs, "other")
    assert recover(folder) == (0, f"{folder}: recovered 1 point of CSVLogger run/7: in {logs}\n", "")
    assert (logs / "log.txt").read_text() == "one"
    assert not folder.exists() and other.exists()


def test_all_folders_in_a_staging_directory_are_recovered(
    tmp_path: Path, default: Path, logs: Path, recover: Recover
) -> None:
    left(tmp_path / "staging", logs / "a", "first")
    left(tmp_path / "staging", logs / "b", "second")
    elsewhere = left(default, logs / "c")
    logs.joinpath("a").mkdir()
    logs.joinpath("b").mkdir()
    code, out, err = recover(tmp_path / "staging")
    assert (code, err) == (0, "")
    assert [line.rpartition("in ")[2] for line in out.splitlines()] == [str(logs / "a"), str(logs / "b")]
    assert elsewhere.exists()


def test_staging_inside_the_logger_directory_is_recovered_once(logs: Path, recover: Recover) -> None:
    folder = left(logs / "staging", logs)
    code, out, err = recover(logs, "--staging-dir", logs / "staging")
    assert (code, out.count("recovered"), err) == (0, 1, "")
    folder = left(logs, logs)
    assert recover(logs, "--staging-dir", logs)[0] == 0
    assert not folder.exists()


@pytest.mark.parametrize("meant", ["runs/version_0", "runs", ".", "../logs/", "../link", "../link/runs"])
def test_a_logger_directory_or_its_parent_is_recovered(
    tmp_path: Path, default: Path, logs: Path, recover: Recover, meant: str
) -> None:
    (tmp_path / "link").symlink_to(logs)
    left(default, logs / "runs" / "version_0", root=str(logs))
    others = [left(default, path, path.name) for path in (tmp_path / "logs2", logs / "runs" / "version_01")]
    for path in ("runs/version_0", "runs/version_01"):
        (logs / path).mkdir(parents=True)
    code, out, _ = recover(logs / meant)
    assert (code, (logs / "runs" / "version_0" / "log.txt").read_text()) == (0, "one")
    assert f"in {logs}/runs/version_0" in out
    assert others[0].exists()


def test_a_sibling_directory_is_left_alone(tmp_path: Path, default: Path, recover: Recover) -> None:
    folder = left(default, tmp_path / "logs2")
    (tmp_path / "logs2").mkdir()
    (tmp_path / "logs").mkdir()
    assert recover(tmp_path / "logs")[0] == 0
    assert folder.exists()


def test_a_logger_without_log_dir_is_found_by_its_save_dir(default: Path, logs: Path, recover: Recover) -> None:
    left(default, "https://server/project", kind="calls", root=str(logs))
    below = left(default, "https://server/project", "below", kind="calls", root=str(logs / "below"))
    code, _, err = recover(logs)
    assert code == 1
    assert "a frame is of kind 'append'" in err
    assert "below" not in err and below.exists()


def test_a_logger_without_a_directory_is_left_alone(
    default: Path, logs: Path, recover: Recover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(logs)
    left(default, "", kind="calls", destination="")
    assert recover(".")[1].startswith("nothing to recover")


def test_another_staging_directory_is_recovered(tmp_path: Path, logs: Path, recover: Recover) -> None:
    left(tmp_path / "fast", logs)
    assert recover(logs)[1].startswith("nothing to recover")
    assert recover(logs, "--staging-dir", tmp_path / "fast")[0] == 0
    assert (logs / "log.txt").read_text() == "one"


def test_urls_are_compared_literally(default: Path, recover: Recover) -> None:
    left(default, "memory://bucket/logs/run")
    assert recover("memory://bucket/log")[1].startswith("nothing to recover")
    assert recover("bucket/logs")[0] == 2
    code, out, _ = recover("memory://bucket/logs/")
    assert (code, "in memory://bucket/logs/run" in out) == (0, True)


def test_recovered_calls_are_in_the_printed_files(default: Path, logs: Path, recover: Recover) -> None:
    folder = left(default, logs, "calls", kind="calls", logger="WandbLogger", root=str(logs))
    next(folder.glob("*.frames")).unlink()
    body = json.dumps({"step": 1, "values": {"loss": 0.5}, "created": 1.0}).encode()
    lost = StagedFrame(kind="call", file="log_image", body=b"", records=1)
    Store(folder).append([StagedFrame(kind="call", file="log_metrics", body=body, points=1), lost])
    code, out, err = recover(logs)
    assert code == 1
    assert "recovered 1 point of WandbLogger run/7: in " in out and "itself was not called" in out
    assert err.startswith("error: 1 call of WandbLogger lost")
    named = out.partition(": in ")[2].partition(";")[0].split(" and ")
    assert sorted(named) == sorted(map(str, logs.iterdir()))


def test_nothing_to_recover_is_reported(tmp_path: Path, default: Path, logs: Path, recover: Recover) -> None:
    code, out, err = recover(logs)
    assert (code, err) == (0, "")
    assert out.startswith(f"nothing to recover: {logs} ") and str(default) in out
    left(default, tmp_path / "other")
    assert recover(logs)[1].endswith("(1 folder of other directories)\n")
    assert recover(logs, "--staging-dir", tmp_path / "none")[1].endswith("none, which does not exist\n")


def test_empty_staging_is_removed(default: Path, logs: Path, recover: Recover) -> None:
    folder = left(default, logs)
    next(folder.glob("*.frames")).unlink()
    assert recover(folder) == (0, f"{folder}: nothing of CSVLogger run/7 was left in it\n", "")
    assert not folder.exists()


def test_a_missing_directory_is_a_single_error(tmp_path: Path, recover: Recover) -> None:
    code, out, err = recover(tmp_path / "nowhere")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {tmp_path}/nowhere does not exist")
    (tmp_path / "file").write_text("")
    assert recover(tmp_path / "file")[2].startswith(f"error: {tmp_path}/file is not a directory")


def test_staging_of_a_removed_directory_is_still_found(default: Path, logs: Path, recover: Recover) -> None:
    folder = left(default, logs / "version_0", root=str(logs))
    logs.rmdir()
    code, _, err = recover(logs)
    assert code == 1
    assert err == (
        f"error: {logs} does not exist; if it is a mount point, mount it, otherwise create it: mkdir -p;"
        f" what was not delivered is still in {folder}\n"
    )


def test_an_unreadable_directory_is_a_single_error(
    logs: Path, recover: Recover, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    assert recover(logs) == (1, "", f"error: {logs} cannot be read: Permission denied\n")


def test_staging_of_a_live_process_is_left_alone(default: Path, logs: Path, recover: Recover) -> None:
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
        " print(flush=True); sys.stdin.read()"
    )
    folder, other = left(default, logs, "live"), left(default, logs, "other")
    command = [sys.executable, "-c", script, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        code, out, _ = recover(logs)
        process.communicate()
    assert code == 0
    assert f"{folder}: left alone: process 42 on  still writes there" in out
    assert folder.exists() and not other.exists()


def test_staging_of_this_process_is_left_alone(default: Path, logs: Path, recover: Recover) -> None:
    made = Manifest(logger="CSVLogger", kind="files", destination=str(logs), root=str(logs), identity="run/7")
    folder, _ = make_staging(default, made)
    assert "left alone" in recover(folder)[1]
    assert folder.exists()


def test_damaged_staging_does_not_block_the_others(default: Path, logs: Path, recover: Recover) -> None:
    for name, text in [("a", "{"), ("b", '{"schema": 2}'), ("c", '{"schema": 1, "pid": "\\u001b[31m"}')]:
        (left(default, logs, name) / "manifest.json").write_text(text)
    left(default, logs, "d")
    code, out, err = recover(logs)
    assert code == 1
    assert out == f"{default}/d: recovered 1 point of CSVLogger run/7: in {logs}\n"
    assert [line.partition(f"error: {default}/")[2][:1] for line in err.splitlines()] == ["a", "b", "c"]
    assert "schema 2; this version of ncclsafe reads schema 1" in err
    assert "\x1b" not in err


def test_escape_codes_in_a_manifest_are_escaped(default: Path, logs: Path, recover: Recover) -> None:
    left(default, logs, identity="\x1b]0;owned\x07\nfake line \ud800", logger="Ünï")
    code, out, _ = recover(logs)
    assert (code, out.count("\n")) == (0, 1)
    assert "\x1b" not in out and "\\x1b]0;owned\\x07 fake line \\ud800" in out


def test_unreadable_bytes_are_counted(default: Path, logs: Path, recover: Recover) -> None:
    folder = left(default, logs)
    half = encode(StagedFrame(kind="append", file="log.txt", body=b"two"))[:-1]
    with next(folder.glob("*.frames")).open("ab") as file:
        file.write(half)
    code, out, err = recover(folder)
    assert (code, "recovered 1 point" in out) == (1, True)
    assert err.startswith(f"error: {len(half)} bytes of {folder} cannot be read and are lost")


def test_a_refusing_storage_is_a_single_error_and_the_others_are_recovered(
    default: Path, logs: Path, recover: Recover
) -> None:
    (logs / "full").write_text("a file")
    first, second = left(default, logs / "full", "first", root=str(logs)), left(default, logs, "second")
    code, out, err = recover(logs)
    assert code == 1
    assert f"{second}: recovered 1 point" in out
    assert err.startswith(f"error: {logs}/full: NotADirectoryError(")
    assert err.endswith(f"still in {first}\n") and first.exists() and not second.exists()


def test_recovery_works_without_stdout(default: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(default, logs)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["logs", "recover", str(logs)]) == 0
    assert (logs / "log.txt").read_text() == "one"


def test_ctrl_c_exits_without_a_traceback(
    default: Path, logs: Path, recover: Recover, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    folder = left(default, logs)
    monkeypatch.setattr(Store, "read", interrupted)
    assert recover(folder)[0] == 130
    monkeypatch.undo()
    assert recover(folder)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "logs"), (["logs"], "recover"), (["logs", "recover"], "needs DIR")]
)
def test_a_missing_argument_is_reported(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_installed_command_survives_a_closed_pipe(tmp_path: Path, default: Path, logs: Path) -> None:
    for name in ("first", "second"):
        left(default, logs / name, name, root=str(logs), logger="Ünï")
    command = [Path(sys.executable).with_name("ncclsafe"), "logs", "recover", default]
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.read_text() for path in sorted(logs.glob("*/log.txt"))] == ["first", "second"]


def test_a_pipe_in_staging_is_a_single_error_and_the_others_are_recovered(
    default: Path, logs: Path, recover: Recover
) -> None:
    first, second = left(default, logs, "first"), left(default, logs, "second")
    os.mkfifo(first / "delivered.json")
    code, out, err = recover(logs)
    assert (code, err.count("\n")) == (1, 1)
    assert f"{first}/delivered.json is neither a file nor a directory" in err
    assert out.startswith(f"{second}: recovered 1 point") and not second.exists()
