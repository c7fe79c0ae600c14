"""Processes that end, change or do not answer while they are inspected, and places that cannot be written to."""

import json
import linecache
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_inspection import BARRIER, look, rank, user
from warm import Warm

from lightning_ncclsafe.cli import main
from lightning_ncclsafe.inspecting import looks, rank_objects, ranks
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts
from lightning_ncclsafe.inspecting.inspected_ranks import seen_rank
from lightning_ncclsafe.inspecting.inspection import inspect
from lightning_ncclsafe.inspecting.looks import NO_MAIN_FRAMES, SeenFrame, SeenThread, StackReader
from lightning_ncclsafe.inspecting.rank_objects import UnreadObjects, objects_of
from lightning_ncclsafe.inspecting.ranks import RankProcess, SeenProcess, python_processes
from lightning_ncclsafe.inspecting.sources import remember_sources
from lightning_ncclsafe.probes.process.main_thread import started_at

ANSWER = json.dumps(
    [{"os_thread_id": 7, "thread_name": "MainThread", "frames": [{"filename": "/a.py", "line": 3, "name": "main"}]}]
)


class Told(StackReader):
    """Gives one stack."""

    def __init__(self, *frames: SeenFrame) -> None:
        super().__init__()
        self.is_there, self._frames = True, frames

    def read(self, pid: int) -> tuple[tuple[SeenThread, ...], str]:
        return (SeenThread(is_main=True, frames=self._frames),), ""


@pytest.fixture
def waiting() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def program(folder: Path, text: str) -> StackReader:
    path = folder / "py-spy"
    path.write_text(f"#!{sys.executable} -S\n{text}")
    path.chmod(0o755)
    return StackReader(str(path))


def test_a_reused_pid_is_not_taken_for_the_rank(waiting: "subprocess.Popen[bytes]") -> None:
    started = started_at(waiting.pid)
    assert started is not None
    same = looks.look(waiting.pid, Told(user(20)), 0.0, started=started)
    other = looks.look(waiting.pid, Told(user(20)), 0.0, started=started - 1)
    assert (len(same.stack), other.stack, other.process and other.process.state) == (1, (), "gone")
    # Nor is what it has open told as the rank's.
    own = RankProcess(pid=waiting.pid, rank=0, local_rank=0, world_size=1, local_world_size=1, job="j", parent=1)
    assert seen_rank(own, (other,), Told(), [own]) == SeenRank(process=own, looks=(other,))


def test_a_pid_reused_between_looks_means_the_rank_ended(
    waiting: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(looks, "started_at", lambda pid: next(ticks))
    seen = [SeenProcess(pid=waiting.pid, environment={"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"})]
    (diagnosis,) = inspect(looks=2, over_s=0.1, processes=lambda: seen, reader=Told(user(20), BARRIER)).diagnoses
    assert (diagnosis.job.ranks, [one.state for one in diagnosis.job.witnessed]) == ((), ["gone"])


def test_a_reader_whose_child_keeps_its_output_open_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader that cannot be killed: waiting for its end would last as long as the hang."""
    monkeypatch.setattr(looks, "_DEADLINE_S", 3.0)
    left = tmp_path / "left"
    text = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
open({str(left)!r}, "w").write(str(child.pid))
child.wait()
"""
    began_s = time.monotonic()
    try:
        threads, why = program(tmp_path, text).read(os.getpid())
        assert time.monotonic() - began_s < 30
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert threads == () and "no answer within" in why


def test_stacks_are_read_without_variables_if_need_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_DEADLINE_S", 3.0)
    text = f"import sys, time\n'--locals' in sys.argv and time.sleep(60)\nprint({ANSWER!r})\n"
    threads, why = program(tmp_path, text).read(7)
    assert ([frame.function for frame in threads[0].frames], why) == (["main"], "")


def test_more_threads_get_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_DEADLINE_S", 0.0)
    monkeypatch.setattr(looks, "_thread_count", lambda pid: 10_000)
    threads, _ = program(tmp_path, f"print({ANSWER!r})\n").read(7)
    assert threads


def test_the_reason_is_shown_instead_of_the_backtrace(tmp_path: Path) -> None:
    said = "Error: Failed to find a python interpreter\n\nStack backtrace:\n  11: main"
    _, why = program(tmp_path, f"import sys\nsys.exit({said!r})\n").read(7)
    assert why.endswith("(Error: Failed to find a python interpreter)")


def test_a_main_thread_without_frames_is_reported(waiting: "subprocess.Popen[bytes]") -> None:
    seen = looks.look(waiting.pid, Told(), 0.0)
    assert (seen.stack, seen.problem) == ((), NO_MAIN_FRAMES)


def test_an_unreadable_process_is_named_and_not_called_gone(
    waiting: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_MEMORY_S", 0.2)
    monkeypatch.setattr(ranks.psutil, "process_iter", lambda: [ranks.psutil.Process(waiting.pid)])
    (tmp_path / str(waiting.pid)).mkdir()
    pipe = tmp_path / str(waiting.pid) / "maps"
    os.mkfifo(pipe)
    (locked,) = python_processes(tmp_path)
    with pipe.open("wb"):
        pass
    assert (locked.pid, locked.is_read, locked.environment) == (waiting.pid, False, None)
    pair = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    other = SeenProcess(pid=os.getpid(), environment=pair)
    found = inspect(looks=2, over_s=0.1, processes=lambda: [locked, other], reader=Told(user(20), BARRIER))
    assert [one.pid for one in found.diagnoses[0].job.witnessed] == []
    assert f"process {waiting.pid} (sleeping) does not let the kernel read" in found.notes[0]


@pytest.mark.parametrize(
    ("command", "inspects"),
    [
        (["/venv/bin/python", "/venv/bin/ncclsafe", "inspect", "--output", "evidence"], True),
        (["python3", "-m", "lightning_ncclsafe", "inspect"], True),
        (["python3", "-m", "lightning_ncclsafe", "train.py", "inspect"], False),
        (["python3", "train.py"], False),
    ],
)
def test_another_inspection_is_not_a_rank(command: list[str], inspects: bool) -> None:
    assert ranks._inspects(command) is inspects


def test_a_zombie_has_ended(waiting: "subprocess.Popen[bytes]") -> None:
    assert [one.has_ended for one in python_processes() if one.pid == waiting.pid] == [False]
    waiting.kill()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
    assert [one.has_ended for one in python_processes() if one.pid == waiting.pid] == [True]


def test_unresponsive_memory_is_left_out(waiting: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(rank_objects, "_MEMORY_S", 0.05)
    monkeypatch.setattr(rank_objects, "Interpreter", lambda pid: answers.wait(60))
    try:
        assert objects_of(waiting.pid, (user(20), BARRIER)) is None
    finally:
        answers.set()


def test_a_free_threaded_python_reads_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED"))
    seen = rank(0, *(look(at_s, user(20), BARRIER) for at_s in (0.0, 1.0)), of=1)
    found = objects_of(seen.process.pid, seen.looks[-1].stack)
    assert found is not None and found.unread is UnreadObjects.UNKNOWN_PYTHON
    missing = job_facts([SeenRank(process=seen.process, looks=seen.looks, objects=found)]).missing
    assert any("has objects of an unknown layout" in text for text in missing)


def test_a_source_is_read_in_its_declared_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "cache", {})
    root = tmp_path / "7" / "root" / "srv"
    root.mkdir(parents=True)
    (root / "old.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'café'\n".encode("latin-1"))
    (root / "broken.py").write_bytes(b"name = '\xff'\n")
    remember_sources(7, ["/srv/old.py", "/srv/broken.py"], processes=tmp_path)
    assert linecache.getline("/srv/old.py", 2) == "name = 'café'\n"
    assert linecache.getlines("/srv/broken.py") == []


def test_an_answer_that_cannot_be_written_is_still_printed(
    waiting: "subprocess.Popen[bytes]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "evidence"
    code = main(["inspect", "--pid", str(waiting.pid), "--seconds", "0.2", "--looks", "2", "--output", str(folder)])
    printed = capsys.readouterr()
    assert code == 1 and "rank 0 did not move" in printed.out
    assert f"because {folder}" in printed.err and "cannot be written to" in printed.err


def test_concurrent_inspections_leave_no_torn_report(
    waiting: "subprocess.Popen[bytes]", warm: Warm, tmp_path: Path
) -> None:
    command = ["-m", "lightning_ncclsafe", "inspect", "--pid", str(waiting.pid), "--seconds", "0.5", "--looks", "2"]
    codes, said = warm.run([*command, "--output", str(tmp_path)], tmp_path, timeout_s=50, envs=[{}, {}])
    assert codes == [1, 1], said
    assert said.count("rank 0 did not move") == 2, said
    # One within the same second as the other has its folder, too.
    assert [json.loads(path.read_text()) for path in tmp_path.rglob("report.json")]
