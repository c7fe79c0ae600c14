"""The lock on a file that a main thread waits for, and who holds it: between real processes."""

import fcntl
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from polling import until

from lightning_ncclsafe.facts import FileLockFacts, LockHolder
from lightning_ncclsafe.probes.process import lock_waits

pytestmark = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this kernel does not list locks")

# Holds a lock until its input ends.
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
{}
print("held", flush=True)
sys.stdin.read()
"""
# Waits for it with its main thread; another one answers each line of input with what the probe sees.
WAITER = """
import fcntl, json, os, sys, threading, time
from dataclasses import asdict
from lightning_ncclsafe.probes.process import lock_waits

def answer():
    for line in sys.stdin:
        found = lock_waits.waited_for()
        left = lock_waits.transaction_left_open()
        print(json.dumps([asdict(found) | {{"left": left}} if found else None, lock_waits.held()]), flush=True)
    os._exit(0)

path = sys.argv[1]
threading.Thread(target=answer, daemon=True).start()
{}
threading.Event().wait()
"""
FLOCK = "file = open(path, 'a'); fcntl.flock(file, fcntl.LOCK_EX)"
LOCKF = "file = open(path, 'a'); fcntl.lockf(file, fcntl.LOCK_EX)"
AGAIN = """
file = open(path, "a")
while True:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        time.sleep(0.5)
"""
FILELOCK = "import filelock; lock = filelock.FileLock(path); lock.acquire(poll_interval=0.5)"
SOFT = "import filelock; lock = filelock.SoftFileLock(path); lock.acquire(poll_interval=0.5)"
CREATED = """
while True:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        break
    except FileExistsError:
        time.sleep(0.5)
"""
LINKED = "own = path + '.own'; open(own, 'w').close()" + CREATED.replace(
    "os.close(os.open(path, os.O_CREAT | os.O_EXCL))", "os.link(own, path)"
)
# Nobody tries again, or the handler waits for something else.
ONCE = """
try:
    os.mkdir(path)
except FileExistsError:
    os.mkdir(path + "/handled")
    time.sleep(60)
"""
ELSEWHERE = """
while True:
    try:
        os.mkdir(path)
        break
    except FileExistsError:
        os.mkdir(path + "/handled")
        while not os.path.exists(path + "/done"):
            time.sleep(0.1)
"""
DIRECTORY = CREATED.replace("os.close(os.open(path, os.O_CREAT | os.O_EXCL))", "os.mkdir(path)")
DATABASE = """
import sqlite3

class Store:
    def __init__(self):
        self.database = sqlite3.connect(path, timeout=600)

    def open_run(self):
        self.database.execute("INSERT INTO runs VALUES (1)")

    def add(self):
        self.database.execute("INSERT INTO scores VALUES (1)")

Store().add()
"""
BATON = "from torch.utils.file_baton import FileBaton; FileBaton(path, 0.5).wait()"


@contextmanager
def running(program: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def held(path: Path, call: str = "flock") -> Iterator["subprocess.Popen[str]"]:
    with running(HOLDER.format(f"fcntl.{call}(file, fcntl.LOCK_EX)" if call else ""), str(path)) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process


@contextmanager
def waiting(wait: str, path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Waits for a file, in a program whose source can be read."""
    script = path.parent / "waits.py"
    script.write_text(WAITER.format(wait))
    with running("import runpy, sys; runpy.run_path(sys.argv[2])", str(path), str(script)) as waiter:
        yield waiter


def asked(process: "subprocess.Popen[str]") -> tuple[dict[str, Any] | None, list[str]]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    found, own = json.loads(process.stdout.readline())
    return found, own


def waited_for(process: "subprocess.Popen[str]") -> dict[str, Any]:
    found = until(lambda: asked(process)[0])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("call", "wait", "is_certain"),
    [
        ("flock", FLOCK, True),
        ("lockf", LOCKF, True),
        ("flock", FILELOCK, True),
        ("flock", AGAIN, False),
    ],
    ids=["flock", "lockf", "filelock", "retry loop"],
)
def test_a_waiter_sees_the_lock_holder(tmp_path: Path, call: str, wait: str, is_certain: bool) -> None:
    path = tmp_path / "x.lock"
    with held(path, call) as holder, running(WAITER.format(wait), str(path)) as waiter:
        found = waited_for(waiter)
        assert found["path"] == str(path)
        assert [one["pid"] for one in found["holders"]] == [holder.pid]
        assert found["holders"][0]["command"] == f"{Path(sys.executable).name} -c"
        assert found["holders"][0]["parents"][0] == os.getpid()
        assert (found["is_certain"], found["by_existence"]) == (is_certain, False)
        holder.kill()
        until(lambda: asked(waiter)[0] is None)
        # It holds the lock itself now.
        until(lambda: asked(waiter)[1] == [str(path)])


def test_who_waits_for_a_database_names_the_change_that_may_have_left_it_locked(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE scores (value)")
        database.execute("BEGIN IMMEDIATE")
        with waiting(DATABASE, path) as waiter:
            found = waited_for(waiter)
            assert found["path"] == str(path)
            opened = f"{tmp_path}/waits.py:{line_of(tmp_path / 'waits.py', 'INSERT INTO runs')} in open_run"
            assert (found["is_certain"], found["left"]) == (False, opened)


def line_of(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def test_a_forked_process_keeps_the_lock_of_one_that_has_closed_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    forked = """
import fcntl, os, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
child = os.fork()
if child:
    file.close()
    print(child, flush=True)
sys.stdin.read()
"""
    with running(forked, str(path)) as parent, running(WAITER.format(FLOCK), str(path)) as waiter:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = waited_for(waiter)
        assert [(one["pid"], one["parents"][0]) for one in found["holders"]] == [(child, parent.pid)]


@pytest.mark.parametrize(
    "wait",
    [SOFT, BATON, CREATED, DIRECTORY, LINKED],
    ids=["soft filelock", "baton", "created by itself", "a directory", "a link"],
)
def test_a_lock_by_existence_is_found(tmp_path: Path, wait: str) -> None:
    path = tmp_path / "x.lock"
    with held(path, "") as holder, waiting(wait, path) as waiter:
        found = waited_for(waiter)
        assert (found["path"], found["by_existence"]) == (str(path), True)
        assert [one["pid"] for one in found["holders"]] == [holder.pid]
        holder.kill()
        holder.wait()
        # Nobody has it open any more, and it is still there.
        until(lambda: not waited_for(waiter)["holders"])
        assert 0 <= waited_for(waiter)["age_s"] < 600
        path.unlink()
        until(lambda: asked(waiter)[0] is None)


@pytest.mark.parametrize("wait", [ONCE, ELSEWHERE], ids=["once", "for something else"])
def test_who_handles_that_a_file_exists_may_wait_for_something_else(tmp_path: Path, wait: str) -> None:
    path = tmp_path / "data"
    path.mkdir()
    with waiting(wait, path) as waiter:
        until(lambda: (path / "handled").exists() and psutil.Process(waiter.pid).status() == psutil.STATUS_SLEEPING)
        assert [asked(waiter)[0] for _ in range(3)] == [None] * 3


def test_a_lock_held_by_the_process_itself_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    twice = f"first = open(path, 'a'); fcntl.flock(first, fcntl.LOCK_EX); {FLOCK}"
    with running(WAITER.format(twice), str(path)) as waiter:
        assert [one["pid"] for one in waited_for(waiter)["holders"]] == [waiter.pid]


def test_a_process_without_a_wait_has_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch()
    assert lock_waits.waited_for() is None
    # That another one has a file locked is no wait, if this one does not sleep.
    with held(path), path.open() as file:
        assert lock_waits.waited_for() is None
        assert str(path) not in lock_waits.held()
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_holders_without_a_visible_process_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open-file locks have no process (-1), and locks of another host or container none visible here (0)."""
    path = tmp_path / "x.lock"
    path.touch()
    status = path.stat()
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines = [f"1: FLOCK  ADVISORY  WRITE 0 {file} 0 EOF", f"1: -> FLOCK  ADVISORY  WRITE {os.getpid()} {file} 0 EOF"]
    lines += [f"2: OFDLCK ADVISORY  WRITE -1 {file} 0 EOF", "3: LEASE  ACTIVE    READ 7 00:01:2 0 EOF", "torn"]
    (tmp_path / "locks").write_text("\n".join(lines))
    monkeypatch.setattr(lock_waits, "_PROC", tmp_path)
    assert lock_waits.lock_on(str(path)) == FileLockFacts(path=str(path))
    (tmp_path / "locks").write_text(lines[0].replace("WRITE 0", "READ  999999999"))
    assert lock_waits.lock_on(str(path)).holders == (LockHolder(pid=999999999),)


@pytest.mark.parametrize(("kind", "is_on_network"), [("nfs4", True), ("ext4", False)])
def test_other_hosts_see_files_on_network_file_systems(
    kind: str, is_on_network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_waits, "_awaited", lambda: FileLockFacts(path="/data/x.lock"))
    monkeypatch.setattr(lock_waits, "filesystem_of", lambda path: kind)
    assert lock_waits.waited_for() == FileLockFacts(path="/data/x.lock", is_on_network=is_on_network)
