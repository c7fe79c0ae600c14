"""Where a forked child crashed, as its parent reads it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from warm import Warm

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux only")

Run: TypeAlias = Callable[[str], list[str]]

# pytest has switched faulthandler on itself, so this needs a program of its own.
BEGIN = """
import faulthandler, os, time
from lightning_ncclsafe.probes.process import child_crashes
from lightning_ncclsafe.probes.process.child_crashes import crash_of, leave, listen
from lightning_ncclsafe.probes.process.crash_traces import CrashTraces
from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal

def decode():
    os.abort()

def forked(run):
    if not (pid := os.fork()):
        run()
        os._exit(0)
    os.waitpid(pid, 0)
    return pid

def functions(stack):
    return [frame.function for frame in stack]

signal = TracebackSignal()
armed = signal.arm()
"""


@pytest.fixture
def run(warm: Warm, tmp_path: Path) -> Run:
    def run(script: str) -> list[str]:
        program = tmp_path / "program.py"
        program.write_text(BEGIN + script)
        (code,), output = warm.run([str(program)], tmp_path, timeout_s=50)
        assert code == 0, output
        return output.splitlines()

    return run


def test_a_crash_is_found_by_the_childs_process_id(run: Run) -> None:
    lines = run("""
print(crash_of(forked(decode), "SIGABRT"))
listen()
crashed, ended = forked(decode), forked(lambda: None)
print(functions(crash_of(crashed, "SIGABRT"))[-1], crash_of(ended, "SIGABRT"), crash_of(os.getpid(), "SIGABRT"))
leave()
print(crash_of(crashed, "SIGABRT"), crash_of(forked(decode), "SIGABRT"), child_crashes._files)
""")
    assert lines == ["()", "decode () ()", "() () []"]


def test_frames_of_the_parent_are_no_place_of_the_child(run: Run) -> None:
    """The child goes on in the function that has forked it."""
    lines = run("""
listen()
crashed = forked(os.abort)
print(functions(crash_of(crashed, "SIGABRT")))
crashed = forked(decode)
print(functions(crash_of(crashed, "SIGABRT")), crash_of(crashed, "SIGKILL"))
""")
    assert lines == ["[]", "['decode'] ()"]


def test_the_thread_that_crashed_is_named(run: Run) -> None:
    lines = run("""
import threading
listen()
def innocent():
    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
print(functions(crash_of(forked(innocent), "SIGABRT"))[-1])
""")
    assert lines == ["decode"]


def test_the_newest_traces_are_kept_of_children_that_all_crash(run: Run) -> None:
    lines = run("""
listen()
crashed = [forked(decode) for _ in range(80)]
print(len(child_crashes._files) <= 65, [bool(crash_of(pid, "SIGABRT")) for pid in (crashed[0], crashed[-1])])
""")
    assert lines == ["True [False, True]"]


def test_a_fork_in_a_signals_handler_during_a_fork_has_its_own_file(run: Run) -> None:
    lines = run("""
listen()
child_crashes._before_fork()
child_crashes._before_fork()
child_crashes._in_parent()
child_crashes._in_parent()
print(len(child_crashes._files), len(set(child_crashes._files)))
""")
    assert lines == ["2 2"]


def test_a_childs_own_faulthandler_survives_in_its_workers(run: Run) -> None:
    lines = run("""
from torch.utils.data import DataLoader
import tempfile
listen()
file = tempfile.TemporaryFile()
class Digits:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        decode()
def own():
    faulthandler.enable(file)
    try:
        next(iter(DataLoader(Digits(), num_workers=1)))
    except RuntimeError:
        pass
    print(os.fstat(file.fileno()).st_size > 0, flush=True)
print(crash_of(forked(own), "SIGABRT"))
""")
    assert lines == ["True", "()"]


def test_the_crash_of_a_childs_child_is_not_the_childs(run: Run) -> None:
    lines = run("""
listen()
child = forked(lambda: forked(decode))
print(crash_of(child, "SIGABRT"))
""")
    assert lines == ["()"]


def test_files_of_children_that_ended_well_are_closed(run: Run) -> None:
    lines = run("""
listen()
crashed = forked(decode)
for _ in range(100):
    forked(lambda: None)
print(len(child_crashes._files) <= 65, len(os.listdir("/proc/self/fd")) < 100)
print(functions(crash_of(crashed, "SIGABRT"))[-1])
""")
    assert lines == ["True True", "decode"]


def test_forks_that_fail_leave_no_files(run: Run) -> None:
    """Their hooks run, but no child writes its number."""
    lines = run("""
listen()
for _ in range(200):
    child_crashes._before_fork()
    child_crashes._in_parent()
print(len(child_crashes._files) <= 65)
""")
    assert lines == ["True"]


def test_a_child_that_arms_its_own_signal_writes_to_its_own_file(run: Run) -> None:
    """A forked rank: its peers look there."""
    lines = run("""
listen()
reads, writes = os.pipe()
def of_rank():
    TracebackSignal().arm()
    os.write(writes, b"x")
    os.read(start, 1)
    decode()
start, starts = os.pipe()
if not (pid := os.fork()):
    of_rank()
traces = CrashTraces()
os.read(reads, 1)
traces.hold([pid])
os.write(starts, b"x")
os.waitpid(pid, 0)
print(crash_of(pid, "SIGABRT"), functions(traces.of(pid).stack)[-1], traces.of(pid).signal)
""")
    assert lines == ["() decode SIGABRT"]


@pytest.mark.parametrize("where", ["", "def decode(): faulthandler.enable(open(os.devnull, 'w')); os.abort()"])
def test_what_the_user_has_switched_on_stays(run: Run, where: str) -> None:
    in_parent = "" if where else "faulthandler.enable(open(os.devnull, 'w'))"
    assert run(f"""
{in_parent}
{where}
listen()
print(crash_of(forked(decode), "SIGABRT"))
""") == ["()"]


def test_the_crash_of_a_loaders_worker_is_found_and_torch_still_names_the_signal(run: Run) -> None:
    """Torch sets its own handlers of this signal in the worker, over those of faulthandler."""
    lines = run("""
import re, signal, sys
from torch.utils.data import DataLoader
class Digits:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGSEGV)
os.dup2(1, 2)
listen()
try:
    next(iter(DataLoader(Digits(), num_workers=1)))
except RuntimeError as error:
    print(functions(crash_of(int(re.search(r"\\d+", str(error))[0]), "SIGSEGV"))[-2:])
""")
    assert "ERROR: Unexpected segmentation fault encountered in worker." in lines[0]
    assert lines[-1].endswith("'__getitem__']")


def test_the_exception_that_ends_a_process_of_multiprocessing_is_found(run: Run) -> None:
    lines = run("""
import multiprocessing
from lightning_ncclsafe.probes.process.child_crashes import raised_in

def read(word):
    raise ValueError(f"no such word: {word}")

def ended_in(target, *arguments):
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.pid

before = ended_in(read, "a")
listen()
raised, left = ended_in(read, "b"), ended_in(lambda: exit(3))
error = raised_in(raised)
print(error.type, error.message, functions(error.stack)[-1], raised_in(before), raised_in(left), raised_in(os.getpid()))
print(multiprocessing.process.BaseProcess._bootstrap.__module__)
""")
    assert lines[-2:] == ["ValueError no such word: b read None None None", "multiprocessing.process"]


def test_the_error_that_a_worker_cannot_send_is_found(run: Run) -> None:
    """Its class is made at run time, as botocore makes its own."""
    lines = run("""
import multiprocessing, sys
from multiprocessing.queues import Queue
from lightning_ncclsafe.probes.process.child_crashes import raised_in
from torch._utils import ExceptionWrapper

def read():
    raise type("NoSuchKey", (KeyError,), {})("clip-7")

def work(queue, sends):
    try:
        read()
    except KeyError:
        queue.put((0, ExceptionWrapper(sys.exc_info()) if sends else lambda: None))
    queue.close()
    queue.join_thread()

def worked(sends):
    queue = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=work, args=(queue, sends))
    process.start()
    process.join()
    return raised_in(process.pid)

listen()
error, batch = worked(True), worked(False)
print(error.type, error.message, functions(error.stack), batch.type)
print(Queue._on_queue_feeder_error.__module__)
""")
    assert lines[-2].startswith("NoSuchKey 'clip-7' ['work', 'read'] ")
    assert lines[-1] == "multiprocessing.queues"
