"""For how long a thread has run, or another process's main thread has not."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from polling import until

from lightning_ncclsafe.probes.process.main_thread import (
    ThreadLook,
    at_work,
    look_at_main_thread,
    look_at_others,
    slept_s,
    thread_ran_s,
    waits_for_gil,
)

ONE = "train (1, #threads: 4)\n---\nse.exec_start                                :  {:.6f}\nse.vruntime   :  7.0\n"


def test_sleep_time_uses_the_clock_of_the_last_core(tmp_path: Path) -> None:
    own = os.sched_getaffinity(0)
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"7 (a) b) S {' '.join(['0'] * 35)} {max(own)} 0 0")
    (folder / "sched").write_text(ONE.format(1_000.5))
    (tmp_path / "thread-self").mkdir()
    (tmp_path / "thread-self" / "sched").write_text(ONE.format(615_200.5))
    assert slept_s(7, tmp_path) == pytest.approx(614.2)
    assert os.sched_getaffinity(0) == own
    # A core on which this process may not run has a clock that it cannot read.
    (folder / "stat").write_text(f"7 (a) S {' '.join(['0'] * 35)} 100000 0 0")
    assert slept_s(7, tmp_path) is None
    assert os.sched_getaffinity(0) == own


def test_a_waiting_process_has_slept_and_a_running_one_has_not() -> None:
    if not Path("/proc/self/sched").exists():
        assert slept_s(os.getpid()) is None
        return
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as waits:
        try:
            before_s = time.monotonic()
            while look_at_main_thread(waits.pid).wait_channel == "" or not slept_s(waits.pid):
                assert time.monotonic() - before_s < 20
            since_s = time.monotonic()
            first_s = slept_s(waits.pid)
            time.sleep(0.3)
            second_s = slept_s(waits.pid)
            until_s = time.monotonic()
        finally:
            waits.communicate(b"\n", timeout=10)
    assert first_s is not None and second_s is not None
    # Clocks of a core go on with its ticks, and leave out what was taken from it.
    assert 0.1 < second_s - first_s < until_s - since_s + 0.1
    assert second_s < until_s - before_s + 0.1
    own_s = slept_s(os.getpid())
    assert own_s is not None and own_s < 1.0
    assert slept_s(999_999_999) is None


def test_how_long_a_thread_has_run_is_known_of_one_that_computes() -> None:
    own = threading.get_native_id()
    before_s = thread_ran_s(own)
    until(lambda: thread_ran_s(own) > before_s)
    assert thread_ran_s(own) < time.process_time() + 1.0
    assert thread_ran_s(2**22 + 1) == 0.0


WITH_A_THREAD = """
import sys, threading
def tick():
    print(threading.get_native_id(), flush=True)
    while True:
        threading.Event().wait(0.25)
threading.Thread(target=tick, daemon=True).start()
sys.stdin.readline()
print(flush=True)
{body}
"""


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        pytest.param("sum(iter(int, 1))", True, id="a-loop-in-C-that-keeps-it"),
        pytest.param("import ctypes; ctypes.PyDLL(None).sleep(60)", True, id="a-sleep-in-C-that-keeps-it"),
        pytest.param("sys.stdin.readline()", False, id="nobody-has-it"),
    ],
)
def test_a_thread_that_waits_for_the_gil_is_recognised(body: str, waits: bool) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-S", "-c", WITH_A_THREAD.format(body=body)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            thread = int(process.stdout.readline())
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "\n"
            # It waits for its next tick at first.
            assert until(lambda: waits_for_gil(process.pid, [process.pid + 1, thread]) is waits)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("wakes_up", "waits", "periods"), [(5, True, 1), (1, True, 3), (0, False, 1)], ids=["busy", "starved", "asleep"]
)
def test_on_a_starved_host_a_thread_that_waits_for_the_gil_is_looked_at_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes_up: int, waits: bool, periods: int
) -> None:
    folder, looks = tmp_path / "7" / "task" / "8", 0
    folder.mkdir(parents=True)
    (folder / "wchan").write_text("futex_wait_queue")

    def pass_time(_: float = 0.0) -> None:
        nonlocal looks
        looks += 1
        woken = wakes_up * looks
        (folder / "schedstat").write_text(f"{50_000 * woken} 0 1\n")
        (folder / "status").write_text(f"voluntary_ctxt_switches:\t{woken}\n")

    pass_time()
    monkeypatch.setattr(time, "sleep", pass_time)
    assert waits_for_gil(7, [8], tmp_path) is waits
    assert looks == 1 + 4 * periods


def test_it_is_seen_whether_another_thread_than_the_main_one_works() -> None:
    done, before = threading.Event(), look_at_others(os.getpid())
    worker = threading.Thread(target=lambda: all(iter(lambda: not done.is_set(), False)))
    worker.start()
    assert until(lambda: worker.native_id in at_work(before, look_at_others(os.getpid())))
    done.set()
    worker.join()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert look_at_others(process.pid) == {}
        process.kill()


@pytest.mark.parametrize(
    ("state", "ran_s", "queued_s", "works"),
    [
        ("S", 0.001, 0.003, False),
        ("S", 0.05, 0.0, True),
        ("S", 0.001, 0.06, True),
        ("R", 0.0, 0.0, True),
        ("R", 0.0002, 0.03, False),
    ],
    ids=["sleeps", "has worked", "has waited for a core", "waits for a core", "asks for the GIL"],
)
def test_a_thread_works_if_it_had_a_core_or_waits_for_one(
    tmp_path: Path, state: str, ran_s: float, queued_s: float, works: bool
) -> None:
    for thread in (7, 8):
        folder = tmp_path / "7" / "task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(f"{round((1.0 + ran_s) * 1e9)} {round(queued_s * 1e9)} 1\n")
        (folder / "stat").write_text(f"{thread} (python) {state} 1 1\n")
    before = {8: ThreadLook(state="sleeping", ran_s=1.0, queued_s=0.0)}
    assert at_work(before, look_at_others(7, tmp_path)) == ({8: pytest.approx(ran_s)} if works else {})


def test_of_a_thread_that_is_not_there_nothing_is_known(tmp_path: Path) -> None:
    assert look_at_others(1, tmp_path) == {}
    assert not waits_for_gil(os.getpid(), [0])
    assert not waits_for_gil(os.getpid(), [])
    assert not waits_for_gil(1, [1], tmp_path)
