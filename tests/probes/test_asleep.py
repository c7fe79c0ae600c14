"""Processes of which all threads wait for one another, and those that may go on."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from polling import until

from lightning_ncclsafe.code.side_thread import OWN_THREADS
from lightning_ncclsafe.probes.process.asleep import SleepWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TWO_LOCKS = """
import threading
first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def take(one, other):
    with one:
        both.wait()
        with other:
            pass
threading.Thread(target=take, args=(second, first)).start()
print("begun", flush=True)
take(first, second)
"""
TAKEN_AGAIN = "import threading; lock = threading.Lock(); print('begun', flush=True); lock.acquire(); lock.acquire()"
POLLS = "import threading; print('begun', flush=True); event = threading.Event()\nwhile not event.wait(0.02): pass"
SLEEPS = "import time; print('begun', flush=True); time.sleep(600)"
READS = "import os; print('begun', flush=True); os.read(0, 1)"
FEEDS = """
import queue, threading, time
items = queue.Queue()
threading.Thread(target=lambda: (time.sleep(600), items.put(1))).start()
print("begun", flush=True)
items.get()
"""


@contextmanager
def running(program: str) -> Iterator[int]:
    """The process id of a program, once it has begun."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            yield process.pid
        finally:
            process.kill()


def channels(pid: int) -> list[str]:
    return [(thread / "wchan").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]


def clock(times: list[float]) -> Callable[[], float]:
    return lambda: times[0]


@pytest.mark.parametrize("program", [TWO_LOCKS, TAKEN_AGAIN])
def test_threads_that_wait_for_one_another_are_asleep_since_the_first_look(program: str) -> None:
    now_s = [100.0]
    watch = SleepWatch(clock=clock(now_s))
    with running(program) as pid:
        until(lambda: all("futex" in channel for channel in channels(pid)))
        assert watch.asleep_s(pid) == 0.0
        now_s[0] = 112.5
        assert watch.asleep_s(pid) == 12.5
        # Others know nothing of it.
        assert SleepWatch().asleep_s(pid) == 0.0
    assert watch.asleep_s(pid) is None


@pytest.mark.parametrize("program", [SLEEPS, READS, FEEDS])
def test_a_thread_that_waits_for_something_else_may_wake_the_others(program: str) -> None:
    with running(program) as pid:
        until(lambda: all(channel not in ("", "0") for channel in channels(pid)))
        assert SleepWatch().asleep_s(pid) is None


def test_a_thread_that_looks_again_and_again_is_not_asleep() -> None:
    now_s = [100.0]
    watch = SleepWatch(clock=clock(now_s))
    with running(POLLS) as pid:

        def is_seen_in_its_wait() -> bool:
            now_s[0] += 1.0
            return watch.asleep_s(pid) == 0.0

        until(is_seen_in_its_wait)
        status = Path(f"/proc/{pid}/status")
        before = status.read_text()
        until(lambda: status.read_text() != before)
        now_s[0] += 20.0
        assert not watch.asleep_s(pid)


def test_what_the_guard_wakes_up_counts_as_asleep() -> None:
    now_s = [100.0]
    watch = SleepWatch(clock=clock(now_s))
    handled = (
        "import signal, threading; signal.signal(signal.SIGUSR1, lambda *_: print('woken', flush=True)); "
        "print('begun', flush=True); lock = threading.Lock(); lock.acquire(); lock.acquire()"
    )
    with running(handled) as pid:
        until(lambda: all("futex" in channel for channel in channels(pid)))
        assert watch.asleep_s(pid) == 0.0
        switches = Path(f"/proc/{pid}/status").read_text()
        os.kill(pid, 10)
        until(lambda: Path(f"/proc/{pid}/status").read_text() != switches)
        until(lambda: all("futex" in channel for channel in channels(pid)))
        watch.note_disturbed(pid)
        now_s[0] = 111.0
        assert watch.asleep_s(pid) == 11.0


LOOKS_AT_ITSELF = """
import os, threading, time
from lightning_ncclsafe.probes.process.asleep import SleepWatch
def look():
    watch, looks = SleepWatch(), 0
    while watch.asleep_s(os.getpid()) is None and looks < 500:
        looks += 1
        time.sleep(0.002)
    print(looks < 500)
thread = threading.Thread(target=look, name="{}")
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("name", "is_asleep"), [(f"{OWN_THREADS}test", "True"), ("another", "False")])
def test_the_guards_own_threads_do_not_count(name: str, is_asleep: str) -> None:
    command = [sys.executable, "-c", LOOKS_AT_ITSELF.format(name)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.strip() == is_asleep
