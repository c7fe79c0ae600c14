"""What a killed process has staged reaches its storage once, whatever is interrupted, and only what is its own."""

import csv
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_ncclsafe.loggers import recovery, staging
from lightning_ncclsafe.loggers.destinations import LocalDestination
from lightning_ncclsafe.loggers.recovery import recover
from lightning_ncclsafe.loggers.segments import StagedFrame, encode
from lightning_ncclsafe.loggers.staging import (
    SCHEMA,
    Claim,
    Manifest,
    StagingError,
    default_staging_dir,
    leftovers,
    make_staging,
    read_manifest,
    staging_folders,
)
from lightning_ncclsafe.loggers.store import Store

# 2026-03-04T05:06:07.000000089Z
BEGAN_NS = 1_772_600_767_000_000_089
# Writes event records to staging of its own and is killed; what it writes after the first is half a frame.
KILLED = """
    import os, signal, sys
    from pathlib import Path
    from lightning_ncclsafe.loggers.events import first_event, record, scalar_event
    from lightning_ncclsafe.loggers.segments import StagedFrame, encode
    from lightning_ncclsafe.loggers.staging import Manifest
    from lightning_ncclsafe.loggers.staging import make_staging
    from lightning_ncclsafe.loggers.store import Store
    from lightning_ncclsafe.loggers.intake import LoggedScalars

    staging, logs = sys.argv[1:]
    manifest = Manifest(logger="TensorBoardLogger", kind="files", destination=logs, root=logs, identity="a/version_0")
    folder, claim = make_staging(Path(staging), manifest)
    store = Store(folder, claim=claim)
    def frame(step, begin=b""):
        body = begin + record(scalar_event(LoggedScalars(step=step, values={"loss": step / 2}, created=1000.0 + step)))
        return StagedFrame(kind="append", file="events.out.tfevents.1", body=body, points=1)
    store.append([frame(0, record(first_event()))])
    store.append([frame(step) for step in range(1, 100)])
    with open(next(folder.glob("*.frames")), "ab") as file:
        file.write(encode(frame(100))[:-5])
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Killed(BaseException):
    """The process is gone at this moment."""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def manifest(logs: Path, kind: str = "files", **said: Any) -> Manifest:
    made = Manifest(logger="CSVLogger", kind=kind, destination=str(logs), root=str(logs), identity="run/version_3")
    return replace(made, **{"host": "node", "pid": 42, "created_ns": BEGAN_NS, **said})


def left(staging: Path, manifest: Manifest, *frames: StagedFrame) -> Path:
    """Staging that a process has left behind."""
    staging.mkdir(mode=0o700)
    (staging / "manifest.json").write_text(json.dumps({"schema": SCHEMA, **asdict(manifest)}))
    Store(staging).append(frames)
    return staging


def append(body: str, file: str = "log.txt") -> StagedFrame:
    return StagedFrame(kind="append", file=file, body=body.encode(), points=1)


def rows(*said: dict[str, Any]) -> StagedFrame:
    body = b"\n".join(json.dumps(row).encode() for row in said)
    return StagedFrame(kind="rows", file="metrics.csv", body=body, points=len(said))


def points(step: int, /, **values: float) -> StagedFrame:
    body = json.dumps({"step": step, "values": values, "created": 1000.5}).encode()
    return StagedFrame(kind="call", file="log_metrics", body=body, points=len(values))


def call(name: str, *args: Any) -> StagedFrame:
    return StagedFrame(kind="call", file=name, body=json.dumps({"args": args, "kwargs": {}}).encode(), records=1)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def other_process(tmp_path: Path, statements: str, *arguments: object) -> "subprocess.Popen[str]":
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(statements))
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_tensorboard_reads_the_event_file_of_a_killed_process(tmp_path: Path, logs: Path) -> None:
    with other_process(tmp_path, KILLED, tmp_path / "staging", logs) as process:
        assert process.wait(30) == -signal.SIGKILL
    ((folder, _),) = leftovers(tmp_path / "staging")
    done = recover(folder)
    assert (done.points, done.to, done.problem) == (100, str(logs), "")
    assert done.lost_bytes > 0
    found = EventAccumulator(str(logs))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(step, step / 2) for step in range(100)]
    assert list((tmp_path / "staging").iterdir()) == []


class Deaths:
    """Kills a recovery at its nth step: in the middle of a write, and before and after what it notes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
        self._left = dies_at
        append, replace_file, read, release = (
            LocalDestination.append,
            LocalDestination.replace,
            Store.read,
            Store.release,
        )

        def half(destination: LocalDestination, file: str, data: bytes) -> None:
            append(destination, file, data[: len(data) // 2])
            self.step()
            append(destination, file, data[len(data) // 2 :])

        def whole(destination: LocalDestination, file: str, data: bytes) -> None:
            self.step()
            replace_file(destination, file, data)

        def noted(store: Store, portion: Any) -> None:
            self.step()
            release(store, portion)
            self.step()

        monkeypatch.setattr(LocalDestination, "append", half)
        monkeypatch.setattr(LocalDestination, "replace", whole)
        monkeypatch.setattr(Store, "release", noted)
        monkeypatch.setattr(Store, "read", lambda store, most_bytes=0: read(store, most_bytes or 1000))

    def step(self) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1


def dies(folder: Path, monkeypatch: pytest.MonkeyPatch, at: int, **how: Any) -> bool:
    """Begins a recovery that is killed; False if it is through before."""
    with monkeypatch.context() as patched:
        Deaths(patched, at)
        try:
            recover(folder, **how)
        except Killed:
            return True
    return False


def test_a_recovery_killed_at_any_step_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = [append(f"{number}\n") for number in range(40)]
    staged += [rows({"step": 0, "loss": 0.0}, {"step": 1, "loss": 0.5})] * 5 + [rows({"step": 2, "acc": 1})]
    step, logs = 0, tmp_path / "logs0"
    logs.mkdir()
    while dies(folder := left(tmp_path / f"staging{step}", manifest(logs), *staged), monkeypatch, step):
        assert recover(folder).problem == ""
        assert (logs / "log.txt").read_text() == "".join(f"{number}\n" for number in range(40))
        found = [(row["step"], row["loss"], row["acc"]) for row in table(logs / "metrics.csv")]
        assert found == [("0", "0.0", ""), ("1", "0.5", "")] * 5 + [("2", "", "1")]
        assert {path.name for path in logs.iterdir()} == {"log.txt", "metrics.csv"}
        assert not folder.exists()
        step += 1
        logs = tmp_path / f"logs{step}"
        logs.mkdir()
    assert step > 15


def test_a_killed_recovery_writes_calls_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = [frame for number in range(20) for frame in (points(number, loss=0.0), call("log_text", number))]
    step, logs = 0, tmp_path / "logs0"
    logs.mkdir()
    made = manifest(logs, "calls")
    while dies(folder := left(tmp_path / f"staging{step}", made, *staged), monkeypatch, step):
        recover(folder)
        as_rows, as_lines = sorted(logs.iterdir())
        assert [row["step"] for row in table(as_rows)] == [str(number) for number in range(20)]
        assert [json.loads(line)["args"] for line in as_lines.read_text().splitlines()] == [[n] for n in range(20)]
        step += 1
        logs = tmp_path / f"logs{step}"
        logs.mkdir()
        made = manifest(logs, "calls")
    assert step > 15


def test_only_unconfirmed_calls_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(tmp_path / "staging", manifest(tmp_path, "calls"), *(points(step, loss=1.0) for step in range(9)))
    made: list[int] = []

    def replay(frames: Sequence[StagedFrame]) -> None:
        made.extend(json.loads(frame.body)["step"] for frame in frames)
        if made == [0, 1, 2, 3]:
            raise ConnectionError("the server is gone")
        if made[-1] == 6 and made.count(6) == 1:
            raise RuntimeError("the server does not understand")

    stopped = recover(folder, replay)
    assert (stopped.points, stopped.to) == (3, "run/version_3")
    assert "the server is gone" in stopped.problem
    with pytest.raises(RuntimeError, match="does not understand"):
        recover(folder, replay)
    done = recover(folder, replay)
    assert made == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert (done.to, folder.exists()) == ("run/version_3", False)


def test_calls_become_readable_files(tmp_path: Path, logs: Path) -> None:
    staged = (
        points(3, loss=0.5, acc=1.0),
        points(4, loss=float("nan")),
        call("log_hyperparams", {"lr": 0.1}),
        StagedFrame(kind="call", file="log_image", body=b"", records=1),
        points(5, step=7.0),
        StagedFrame(kind="call", file="log_text", body=b"\xff[", records=1),
        StagedFrame(kind="call", file="log_list", body=b"[1]", records=1),
    )
    made = manifest(logs, "calls", logger="WandbLogger", identity="my project/../ab12")
    done = recover(left(tmp_path / "staging", made, *staged))
    name = "recovered-WandbLogger-my-project-..-ab12-2026-03-04T05-06-07.000000089Z-42"
    assert {path.name for path in logs.iterdir()} == {f"{name}.csv", f"{name}.jsonl"}
    assert done.to == f"{logs}/{name}.csv and {logs}/{name}.jsonl"
    assert (done.points, done.records, done.lost_calls) == (4, 3, 1)
    assert table(logs / f"{name}.csv") == [
        {"step": "3", "time": "1000.5", "loss": "0.5", "acc": "1.0"},
        {"step": "4", "time": "1000.5", "loss": "nan", "acc": ""},
    ]
    lines = [json.loads(line) for line in (logs / f"{name}.jsonl").read_text().splitlines()]
    assert [line["call"] for line in lines] == ["log_hyperparams", "log_image", "log_metrics", "log_text", "log_list"]
    assert lines[0]["args"] == [{"lr": 0.1}]
    assert "memory" in lines[1]["lost"]
    assert (lines[2]["step"], lines[2]["values"]) == (5, {"step": 7.0})
    assert (lines[3]["text"], lines[4]["text"]) == ("\ufffd[", "[1]")


def test_loggers_started_together_have_separate_files(tmp_path: Path, logs: Path) -> None:
    for number in range(3):
        made = manifest(logs, "calls", logger="../../Ünï", created_ns=BEGAN_NS + number)
        recover(left(tmp_path / f"staging{number}", made, points(number, loss=1.0)))
    names = sorted(path.name for path in logs.iterdir())
    assert len(names) == 3
    assert names[0] == "recovered-n-run-version_3-2026-03-04T05-06-07.000000089Z-42.csv"


def test_without_a_log_directory_the_file_is_beside_the_staging(tmp_path: Path) -> None:
    made = manifest(tmp_path, "calls", destination="", root="")
    recover(left(tmp_path / "staging", made, points(0, loss=1.0)))
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("recovered-CSVLogger-") and file.suffix == ".csv"


def test_staging_of_a_live_process_is_left_alone(tmp_path: Path, logs: Path) -> None:
    script = f"""
        import sys
        from pathlib import Path
        from lightning_ncclsafe.loggers.staging import Manifest
        from lightning_ncclsafe.loggers.staging import make_staging
        said = dict(logger="L", kind="files", destination={str(logs)!r}, root={str(logs)!r}, identity="i")
        print(make_staging(Path(sys.argv[1]), Manifest(**said))[0], flush=True)
        sys.stdin.read()
    """
    with other_process(tmp_path, script, tmp_path / "staging") as process:
        assert process.stdout is not None and process.stdin is not None
        folder = Path(process.stdout.readline().strip())
        Store(folder).append([append("1")])
        busy = recover(folder)
        assert (busy.is_busy, busy.points) == (True, 0)
        assert f"process {process.pid} on " in busy.problem
        process.stdin.close()
        process.wait(10)
    assert recover(folder).points == 1


def test_staging_of_this_process_is_left_alone_and_stays_claimed(tmp_path: Path, logs: Path) -> None:
    folder, _ = make_staging(tmp_path / "staging", manifest(logs))
    assert list(leftovers(tmp_path / "staging")) == []
    (tmp_path / "link").symlink_to(folder)
    assert recover(folder).is_busy and recover(tmp_path / "link").is_busy
    # Had the claim been tried, it would be gone by now.
    script = "import sys; from pathlib import Path; from lightning_ncclsafe.loggers.recovery import recover\n"
    with other_process(tmp_path, f"{script}print(recover(Path(sys.argv[1])).is_busy)", folder) as process:
        assert process.communicate(timeout=30)[0] == "True\n"


def test_staging_of_an_earlier_process_with_our_pid_is_not_ours(tmp_path: Path, logs: Path) -> None:
    (tmp_path / "all").mkdir()
    folder, _ = make_staging(tmp_path / "other", manifest(logs))
    there = read_manifest(folder)
    old = left(tmp_path / "all" / "old", replace(there, pid=os.getpid()), append("1"))
    assert [found for found, _ in leftovers(tmp_path / "all")] == [old]


def test_only_one_of_two_threads_recovers(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    is_writing, is_tried = threading.Event(), threading.Event()
    write = LocalDestination.append

    def slowly(*args: Any) -> None:
        is_writing.set()
        is_tried.wait(10)
        write(*args)

    monkeypatch.setattr(LocalDestination, "append", slowly)
    thread = threading.Thread(target=recover, args=(folder,))
    thread.start()
    assert is_writing.wait(10)
    second = recover(folder)
    is_tried.set()
    thread.join()
    assert second.is_busy
    assert (logs / "log.txt").read_text() == "1"


def test_staging_just_recovered_by_another_process_is_harmless(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def after_another(folder: Path) -> Claim:
        monkeypatch.setattr(recovery, "Claim", Claim)
        recover(folder)
        return Claim(folder)

    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    monkeypatch.setattr(recovery, "Claim", after_another)
    late = recover(folder)
    assert late.is_busy and "it is gone" in late.problem
    assert (logs / "log.txt").read_text() == "1"
    assert not folder.exists()


def test_claiming_a_folder_during_its_removal_leaves_nothing(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def while_removed(folder: Path) -> Claim:
        (folder / "manifest.json").unlink()
        return Claim(folder)

    folder = left(tmp_path / "staging", manifest(logs))
    monkeypatch.setattr(recovery, "Claim", while_removed)
    assert recover(folder).is_busy
    assert not folder.exists()


def test_a_folder_is_claimed_before_it_has_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def looked_at(folder: Path) -> Claim:
        seen.append((folder / "manifest.json").exists())
        return Claim(folder)

    monkeypatch.setattr(staging, "Claim", looked_at)
    folder, _ = make_staging(tmp_path / "staging", manifest(tmp_path))
    assert seen == [False]
    assert read_manifest(folder).pid == os.getpid()


def test_a_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        make_staging(tmp_path / "staging", manifest(tmp_path))
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_refusing_storage_is_reported_and_staging_kept(tmp_path: Path, logs: Path) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1", "a/log.txt"))
    (logs / "a").write_text("in the way")
    done = recover(folder)
    assert done.problem.startswith(f"{logs}: NotADirectoryError(")
    (logs / "a").unlink()
    assert recover(folder).points == 1
    assert (logs / "a" / "log.txt").read_text() == "1"


def test_an_unsupported_url_is_reported(tmp_path: Path) -> None:
    made = manifest(tmp_path, destination="nonsense://bucket/logs", root="nonsense://bucket")
    folder = left(tmp_path / "staging", made, append("1"))
    assert "Protocol not known: nonsense" in recover(folder).problem
    assert folder.exists()


def test_nothing_is_written_below_a_mount_point_without_its_mount(tmp_path: Path) -> None:
    made = manifest(tmp_path, root=f"{tmp_path}/mnt/logs", destination=f"{tmp_path}/mnt/logs/version_0")
    (tmp_path / "mnt").mkdir()
    folder = left(tmp_path / "staging", made, append("1"))
    assert recover(folder).problem.startswith(f"{tmp_path}/mnt/logs does not exist")
    assert list((tmp_path / "mnt").iterdir()) == []
    (tmp_path / "mnt" / "logs").mkdir()
    assert recover(folder).points == 1
    assert (tmp_path / "mnt" / "logs" / "version_0" / "log.txt").read_text() == "1"


def test_read_only_staging_is_not_recovered(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert "Read-only file system" in recover(folder).problem
    assert list(logs.iterdir()) == []


def test_an_unopenable_segment_does_not_count_as_lost(tmp_path: Path, logs: Path) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    (folder / "00000002.frames").mkdir()
    done = recover(folder)
    assert "must be readable and writable" in done.problem
    assert list(logs.iterdir()) == []


def test_frames_of_files_outside_the_directory_count_as_lost(tmp_path: Path, logs: Path) -> None:
    out = append("1", "../out.txt")
    done = recover(left(tmp_path / "staging", manifest(logs), append("1"), out))
    assert (done.points, done.lost_bytes) == (1, len(encode(out)))
    assert not (tmp_path / "out.txt").exists()


def test_file_frames_are_not_replayed_as_calls(tmp_path: Path, logs: Path) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1"), points(0, loss=1.0))
    assert "a frame is of kind 'call'" in recover(folder).problem
    assert folder.exists()


@pytest.mark.parametrize(
    "said",
    [
        "{",
        "[" * 100_000,
        "[]",
        "{}",
        '{"schema": 2}',
        '{"schema": true}',
        '{"schema": 1, "logger": "L"}',
        {"kind": "pickle"},
        {"destination": "relative"},
        {"destination": ""},
        {"root": "relative"},
        {"pid": "1"},
        {"created_ns": 10**30},
        {"created_ns": -1},
        {"extra": "field"},
    ],
)
def test_an_invalid_manifest_is_refused(tmp_path: Path, logs: Path, said: str | dict[str, Any]) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    text = said if isinstance(said, str) else json.dumps({"schema": SCHEMA, **asdict(manifest(logs)), **said})
    (folder / "manifest.json").write_text(text)
    with pytest.raises(StagingError, match=str(folder)) as raised:
        recover(folder)
    assert len(str(raised.value)) < 600
    assert list(logs.iterdir()) == []


def test_world_writable_staging_is_refused(tmp_path: Path, logs: Path) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    folder.chmod(0o770)
    with pytest.raises(StagingError, match="others can write to it"):
        recover(folder)
    folder.chmod(0o750)
    assert recover(folder).points == 1


@pytest.mark.parametrize("foreign", [".", "00000001.frames"])
def test_staging_of_another_user_is_refused(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    belongs_to(monkeypatch, folder / foreign, os.getuid() + 1)
    with pytest.raises(StagingError, match=f"belongs to user {os.getuid() + 1}"):
        recover(folder)
    assert list(logs.iterdir()) == []


def belongs_to(monkeypatch: pytest.MonkeyPatch, path: Path, user: int) -> None:
    lstat = Path.lstat

    def found(self: Path) -> os.stat_result:
        values = lstat(self)
        return os.stat_result((*values[:4], user, *values[5:10])) if self == path else values

    monkeypatch.setattr(Path, "lstat", found)


def test_relative_paths_belong_to_the_logging_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = make_staging(tmp_path / "staging", manifest(tmp_path, destination="logs/run", root="logs"))
    said = read_manifest(folder)
    assert (said.destination, said.root) == (f"{tmp_path}/logs/run", f"{tmp_path}/logs")
    url = manifest(tmp_path, destination="s3://a/b", root="")
    assert (url.destination, url.root) == ("s3://a/b", "")


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return default_staging_dir()


def test_the_default_directory_is_private_on_both_levels(tmp_path: Path, default: Path) -> None:
    make_staging(default, manifest(tmp_path))
    assert [folder.stat().st_mode & 0o777 for folder in (default.parent, default)] == [0o700, 0o700]
    default.parent.chmod(0o777)
    default.chmod(0o755)
    make_staging(default, manifest(tmp_path))
    assert [folder.stat().st_mode & 0o777 for folder in (default.parent, default)] == [0o700, 0o700]


def test_a_linked_or_foreign_default_folder_is_refused(
    tmp_path: Path, default: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    default.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a symbolic link"):
        make_staging(default, manifest(tmp_path))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    default.parent.unlink()
    default.mkdir(parents=True)
    belongs_to(monkeypatch, default.parent, 4242)
    with pytest.raises(PermissionError, match="belongs to user 4242"):
        make_staging(default, manifest(tmp_path))


def test_an_open_user_directory_is_refused_and_unchanged(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    staging.chmod(0o775)
    with pytest.raises(PermissionError, match="others can write to"):
        make_staging(staging, manifest(tmp_path))
    assert staging.stat().st_mode & 0o777 == 0o775
    staging.chmod(0o755)
    make_staging(staging, manifest(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="is not a directory"):
        make_staging(tmp_path / "file", manifest(tmp_path))


def test_an_unreadable_folder_hides_no_others(tmp_path: Path, logs: Path) -> None:
    (tmp_path / "all" / "empty").mkdir(parents=True)
    (tmp_path / "all" / "web").mkdir()
    (tmp_path / "all" / "web" / "manifest.json").write_text('{"name": "somebody else\'s"}')
    damaged = left(tmp_path / "all" / "damaged", manifest(logs))
    (damaged / "manifest.json").write_text("{")
    good = left(tmp_path / "all" / "good", manifest(logs))
    assert [folder for folder, _ in leftovers(tmp_path / "all")] == [good]
    assert staging_folders(tmp_path / "all") == [damaged, good]
    assert list(leftovers(tmp_path / "none")) == []


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("removed", ["lock", None])
def test_a_live_process_whose_lock_was_cleaned_up_is_left_alone(
    tmp_path: Path, logs: Path, is_alive: bool, removed: str | None
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        began_ns = time.time_ns() + 10**9 if is_alive else 1
        made = manifest(logs, host=socket.gethostname(), pid=process.pid, created_ns=began_ns)
        folder = left(tmp_path / "staging", made, append("1"))
        # One that is there and free was given up.
        (folder / "lock").touch()
        if removed:
            (folder / removed).unlink()
        # However often somebody asks.
        for _ in range(2 if is_alive and removed else 1):
            done = recover(folder)
            assert done.is_busy == (is_alive and removed is not None)
        process.communicate(b"\n")
    assert folder.exists() == done.is_busy
    if done.is_busy:
        assert f"process {process.pid} on " in done.problem
        assert recover(folder).points == 1


@pytest.mark.parametrize("pid", [-1, 0, 2**40, 10**30])
def test_an_impossible_pid_is_not_alive(tmp_path: Path, logs: Path, pid: int) -> None:
    made = manifest(logs, host=socket.gethostname(), pid=pid, created_ns=time.time_ns())
    assert recover(left(tmp_path / "staging", made, append("1"))).points == 1


def test_a_lock_removed_during_locking_is_not_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.lockf

    def after_its_owner(handle: int, how: int) -> None:
        (tmp_path / "lock").unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "lockf", after_its_owner)
    assert not Claim(tmp_path).is_mine
    monkeypatch.undo()
    again = Claim(tmp_path)
    assert again.is_mine
    again.give_up()


@pytest.mark.parametrize("name", ["delivered.json", "00000002.frames", "lock", "anything"])
def test_a_pipe_in_place_of_a_file_is_refused_without_blocking(tmp_path: Path, logs: Path, name: str) -> None:
    folder = left(tmp_path / "staging", manifest(logs), append("1"))
    os.mkfifo(folder / name)
    with pytest.raises(StagingError, match=f"{name} is neither a file nor a directory"):
        recover(folder)
    assert list(leftovers(tmp_path)) == []
    assert list(logs.iterdir()) == []


@pytest.mark.parametrize("name", ["delivered.json", "00000002.frames", "manifest.json"])
def test_a_store_does_not_wait_for_a_pipe(tmp_path: Path, name: str) -> None:
    (tmp_path / "staging").mkdir()
    os.mkfifo(tmp_path / "staging" / name)
    store = Store(tmp_path / "staging")
    store.append([append("1")])
    portion = store.read()
    assert portion is not None and portion.frames == (append("1"),)


# More than a system has.
DEAD = 2**30


@pytest.mark.parametrize(
    ("pid", "names", "goes"),
    [
        (DEAD, ["lock", "manifest.json.tmp"], True),
        (DEAD, [], True),
        (os.getpid(), ["lock"], False),
        (DEAD, ["lock", "00000001.frames"], False),
        (DEAD, ["lock", "manifest.json"], False),
    ],
)
def test_an_empty_folder_of_a_dead_process_is_removed(pid: int, names: list[str], goes: bool, tmp_path: Path) -> None:
    folder = tmp_path / f"CSVLogger-1795333515800272953-{pid}-1"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    staging.remove_unfinished(tmp_path)
    assert folder.exists() is not goes


def test_a_folder_being_created_is_kept(tmp_path: Path) -> None:
    (folder := tmp_path / f"CSVLogger-1795333515800272953-{DEAD}-1").mkdir()
    claim = Claim(folder)
    staging.remove_unfinished(tmp_path)
    claim.give_up()
    assert folder.exists()
