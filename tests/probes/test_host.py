"""The host and its processes, from real ones."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ncclsafe.facts import GONE
from lightning_ncclsafe.probes.host.resources import (
    HostProbe,
    child_processes,
    filesystem_of,
    find_ranks,
    look_at,
    own_memory,
)

Memory = namedtuple("Memory", "total available")
Swap = namedtuple("Swap", "total used sin")


def in_status(name: str) -> int:
    """Bytes of this process, of a line like ``VmRSS:  524288 kB``."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def test_each_fact_is_the_number_that_the_host_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 2.5, 3.5))
    monkeypatch.setattr(os, "sched_getaffinity", {0: {2, 3, 5}}.__getitem__)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(total=1000, available=300))
    monkeypatch.setattr(psutil, "swap_memory", lambda: Swap(total=500, used=70, sin=10))
    probe = HostProbe()
    monkeypatch.setattr(psutil, "swap_memory", lambda: Swap(total=500, used=70, sin=14))
    facts = probe.read()
    assert facts.rss_bytes == pytest.approx(in_status("VmRSS"), rel=0.1)
    assert facts.process_swap_bytes == pytest.approx(in_status("VmSwap"), rel=0.1, abs=1 << 20)
    assert (facts.memory_total_bytes, facts.memory_available_bytes) == (1000, 300)
    assert (facts.swap_total_bytes, facts.swap_used_bytes, facts.swapped_in_bytes) == (500, 70, 4)
    assert (facts.cores, facts.load_1min) == (3, 1.5)


def wait_for_the_end(connection: Connection) -> None:
    connection.send("here")
    connection.recv()


@pytest.fixture
def child() -> Iterator[int]:
    """A forked child that sleeps until the test is over."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=wait_for_the_end, args=(there,))
    process.start()
    there.close()
    assert here.recv() == "here"
    assert process.pid is not None
    yield process.pid
    process.kill()
    process.join()


def test_the_own_process_is_running() -> None:
    facts = look_at(os.getpid(), rank=3)
    assert (facts.pid, facts.rank, facts.state) == (os.getpid(), 3, "running")
    assert facts.cpu_s is not None and facts.cpu_s > 0
    assert facts.rss_bytes is not None and facts.rss_bytes > 1 << 20


def test_a_stopped_process_is_recognised(child: int) -> None:
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert look_at(child).state == "stopped"
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, os.WCONTINUED)
    assert look_at(child).state in ("running", "sleeping")


def test_a_dead_process_is_a_zombie_until_it_is_reaped_and_then_gone() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert look_at(process.pid, rank=1).state == "zombie"
    process.wait()
    gone = look_at(process.pid, rank=1)
    assert (gone.pid, gone.rank, gone.state) == (process.pid, 1, "gone")


def test_a_reused_pid_counts_as_gone(child: int) -> None:
    started = psutil.Process(child).create_time()
    assert look_at(child, started=started).state != "gone"
    assert look_at(child, started=started - 60).state == "gone"
    assert look_at(child, started=started + 60).state == "gone"


def test_only_multiprocessing_children_are_workers(child: int) -> None:
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child in child_processes(besides=[])
        assert other.pid not in child_processes(besides=[])
        assert child not in child_processes(besides=[child])
    finally:
        other.communicate()


def test_a_spawned_child_is_a_worker(tmp_path: Path) -> None:
    """As multiprocessing's ``spawn`` starts it; a real one would import this test's modules again, for seconds."""
    command = [sys.executable, "-S", "-c", "input()", "--multiprocessing-fork"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert worker.pid in child_processes(besides=[])
    finally:
        worker.communicate()


def rank_process(port: str, local_rank: str | None) -> "subprocess.Popen[bytes]":
    environment = {"MASTER_PORT": port} | ({"LOCAL_RANK": local_rank} if local_rank is not None else {})
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "print(flush=True); input()"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


def ended(*processes: "subprocess.Popen[bytes]") -> None:
    for process in processes:
        process.communicate()


def test_a_rank_is_the_program_and_not_its_wrapper() -> None:
    port = f"no-port-{os.getpid()}"
    script = f"{sys.executable} -S -c 'print(flush=True); input()'; true"
    wrapper = subprocess.Popen(
        ["sh", "-c", script],
        env={"MASTER_PORT": port, "LOCAL_RANK": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert wrapper.stdout is not None and wrapper.stdout.readline()
        assert find_ranks(port, range(3)) == {0: psutil.Process(wrapper.pid).children()[0].pid}
    finally:
        ended(wrapper)


def test_a_wrapper_stands_in_until_the_program_starts() -> None:
    port = f"no-port-{os.getpid()}"
    wrapper = subprocess.Popen(
        ["sh", "-c", "echo; read x; true"],
        env={"MASTER_PORT": port, "LOCAL_RANK": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert wrapper.stdout is not None and wrapper.stdout.readline()
        assert find_ranks(port, range(3)) == {0: wrapper.pid}
    finally:
        ended(wrapper)


def test_slurm_ranks_are_found_by_their_step() -> None:
    job = {"SLURM_JOB_ID": f"no-job-{os.getpid()}", "SLURM_STEP_ID": "0"}
    command = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    # The last one is numbered across hosts (srun --distribution=cyclic).
    environments = [job | {"SLURM_LOCALID": "1"}, job | {"SLURM_STEP_ID": "1", "SLURM_LOCALID": "2"}, job]
    environments += [job | {"SLURM_LOCALID": "2", "SLURM_PROCID": "11"}]
    processes = [
        subprocess.Popen(command, env=one, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for one in environments
    ]
    try:
        assert all(process.stdout is not None and process.stdout.readline() for process in processes)
        assert find_ranks("no-port", range(6, 9), job | {"SLURM_LOCALID": "0"}) == {
            7: processes[0].pid,
            11: processes[3].pid,
        }
        below_slurm = job | {"SLURM_LOCALID": "0", "LOCAL_RANK": "0"}
        assert find_ranks("no-port", range(6, 9), below_slurm) == {7: processes[0].pid, 8: processes[3].pid}
        assert find_ranks("no-port", range(3), {}) == {}
    finally:
        ended(*processes)


def test_own_memory_matches_the_outside_view() -> None:
    rss_bytes, swap_bytes = own_memory()
    seen = look_at(os.getpid())
    assert rss_bytes is not None and seen.rss_bytes is not None
    assert abs(rss_bytes - seen.rss_bytes) < 50_000_000
    assert (swap_bytes is None) == (seen.swap_bytes is None)


def test_ranks_are_found_by_their_environment() -> None:
    port = f"no-port-{os.getpid()}"
    processes = [rank_process(port, "0"), rank_process(port, "1"), rank_process(port + "0", "2")]
    processes += [rank_process(port, None), rank_process(port, "first")]
    try:
        assert find_ranks(port, range(3)) == {0: processes[0].pid, 1: processes[1].pid}
    finally:
        for process in processes:
            process.communicate()


Mount = namedtuple("Mount", "mountpoint fstype")
MOUNTS = [
    Mount("/", "overlay"),
    Mount("/mnt/dead", "nfs4"),
    Mount("/mnt/dead/scratch", "lustre"),
    Mount("/home", "autofs"),
    Mount("/home", "nfs"),
]


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/mnt/dead", "nfs4"),
        ("/mnt/dead/runs/7", "nfs4"),
        ("/mnt/dead/scratch/runs", "lustre"),
        ("/mnt/deadline/runs", "overlay"),
        ("/mnt/dead/../deadline", "overlay"),
        ("/home/me", "nfs"),
        ("s3://bucket/runs", ""),
        ("/", "overlay"),
    ],
)
def test_the_file_system_of_a_path_is_found(path: str, filesystem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: MOUNTS)
    assert filesystem_of(path) == filesystem


def test_without_mounts_there_is_no_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    assert filesystem_of("/mnt/dead") == ""


def test_the_path_itself_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a dead mount even ``stat`` never returns."""
    touched: list[object] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *args, **options: touched.append(path) or call(path, *args, **options)

    for name in ("stat", "lstat", "statvfs", "readlink", "open", "access", "scandir"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    assert filesystem_of(str(tmp_path / "runs")) != ""
    assert not [path for path in touched if str(tmp_path) in str(path)]


@pytest.mark.parametrize(
    ("end", "ended_by", "exit_code"),
    [
        (lambda: os._exit(2), "", 2),
        (lambda: os._exit(0), "", 0),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", None),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM", None),
    ],
)
def test_the_exit_status_of_a_zombie_is_read(end: Callable[[], object], ended_by: str, exit_code: int | None) -> None:
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end()
        os._exit(99)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    seen = look_at(pid)
    os.waitpid(pid, 0)
    assert (seen.state, seen.ended_by, seen.exit_code) == ("zombie", ended_by, exit_code)
    assert look_at(pid).state == GONE
