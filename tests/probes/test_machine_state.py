"""What the kernel counts of the main thread, of quotas and pressure, and what children have ended: real and written."""

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from own_threads import join_own_threads
from polling import until

from lightning_ncclsafe.facts import EndedProcess, InterfaceFacts
from lightning_ncclsafe.probes.host.cgroups import ControlGroups, Throttling
from lightning_ncclsafe.probes.host.swap import PressureLook, look_at_pressure, pressure_between
from lightning_ncclsafe.probes.machine_state import MachineProbe
from lightning_ncclsafe.probes.process.ended_children import ChildWatch, ended_children
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread

FORK = multiprocessing.get_context("fork")
# Nothing comes near it unless a test makes it.
AMPLE_S = 20.0


def test_this_process_runs_and_gets_cpu_time() -> None:
    look = look_at_main_thread()
    assert look.state == "running" and not look.is_blocked
    assert look.ran_s is not None and look.ran_s > 0
    assert look.queued_s is not None and look.preempted is not None and look.major_faults is not None
    again = look_at_main_thread()
    assert again.ran_s is not None and again.ran_s >= look.ran_s


def write_thread(proc: Path, pid: int, **files: str) -> None:
    folder = proc / str(pid) / "task" / str(pid)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_a_thread_waiting_for_storage_is_recognised(tmp_path: Path) -> None:
    """With a name that would be taken for a state, were it not for the last bracket."""
    stat = "77 (pt) R (x)) D 1 77 77 0 -1 4194304 5210 0 31 0 140 12 0 0 20 0 9 0 55170 12000 890 18446744073709551615"
    status = "Name:\tpython\nvoluntary_ctxt_switches:\t90\nnonvoluntary_ctxt_switches:\t412\n"
    write_thread(tmp_path, 77, stat=stat, status=status, schedstat="1520000000 340000000 812\n", wchan="nfs_wait_bit")
    assert look_at_main_thread(77, tmp_path) == ThreadLook(
        state="disk-sleep", wait_channel="nfs_wait_bit", ran_s=1.52, queued_s=0.34, preempted=412, major_faults=31
    )


def test_missing_kernel_data_is_unknown(tmp_path: Path) -> None:
    assert look_at_main_thread(77, tmp_path) == ThreadLook()
    write_thread(tmp_path, 77, stat="77 (python) S 1", wchan="0", schedstat="0\n")
    assert look_at_main_thread(77, tmp_path) == ThreadLook(state="sleeping")


def write_pressure(proc: Path, cpu: int, memory: int, io: int) -> None:
    (proc / "pressure").mkdir(exist_ok=True)
    for name, total in (("cpu", cpu), ("memory", memory), ("io", io)):
        line = f"avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n"
        (proc / "pressure" / name).write_text(f"some {line}full {line}" if name != "cpu" else f"some {line}")


def test_pressure_is_the_difference_of_two_samples(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path / "none", tmp_path)
    write_pressure(tmp_path, 1_000_000, 0, 500_000)
    before = look_at_pressure(groups, tmp_path)
    write_pressure(tmp_path, 9_000_000, 2_500_000, 500_000)
    found = pressure_between(before, look_at_pressure(groups, tmp_path), 10.0)
    assert (found.cpu_waited, found.memory_stalled, found.io_stalled) == (0.8, 0.25, 0.0)
    assert (found.throttled_s, found.periods, found.throttled_periods) == (None, None, None)


def test_throttling_is_the_difference_of_two_samples() -> None:
    before, after = Throttling(100, 10, 1.0), Throttling(300, 190, 18.5)
    found = pressure_between(PressureLook(before, {}), PressureLook(after, {}), 20.0)
    assert (found.throttled_s, found.periods, found.throttled_periods) == (17.5, 200, 180)
    assert found.cpu_waited is None


@pytest.fixture
def probe() -> Iterator[MachineProbe]:
    now = [100.0]
    made = MachineProbe(clock=lambda: now[0])
    made.pass_s = lambda seconds: now.__setitem__(0, now[0] + seconds)  # type: ignore[attr-defined]
    yield made
    made.close()


def test_nothing_is_known_before_enough_samples(probe: MachineProbe) -> None:
    probe.note()
    facts = probe.read()
    assert (facts.main_thread, facts.pressure) == (None, None)
    assert facts.shm_total_bytes and facts.shm_free_bytes is not None


def test_the_last_twenty_seconds_are_reported(probe: MachineProbe) -> None:
    for _ in range(60):
        probe.note()
        probe.pass_s(0.5)  # type: ignore[attr-defined]
    facts = probe.read()
    assert facts.main_thread is not None and facts.pressure is not None
    assert facts.main_thread.over_s == facts.pressure.over_s == 20.0
    # One each second, and the one now.
    assert facts.main_thread.looks == facts.main_thread.running_looks == 21
    assert facts.main_thread.blocked_looks == 0
    assert facts.main_thread.state == "running"
    # Before it stood still it did something else.
    since = probe.read(9.0).main_thread
    assert since is not None and (since.over_s, since.looks) == (9.0, 10)
    at_least = probe.read(0.1).main_thread
    assert at_least is not None and (at_least.over_s, at_least.looks) == (1.0, 2)


def own_state() -> str:
    probe = MachineProbe(clock=itertools.count(100.0, 0.5).__next__)
    for _ in range(10):
        probe.note()
    found = probe.read().main_thread
    probe.close()
    return found.state if found is not None else "not seen"


def test_a_forked_process_samples_its_own_main_thread() -> None:
    """One of `os.fork`: `multiprocessing` sets the main thread's `native_id` right, Python itself does not."""
    answer, told = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(told, own_state().encode())
        finally:
            os._exit(0)
    os.close(told)
    with open(answer) as stream:
        assert stream.read() == "running"
    assert os.waitpid(pid, 0)[1] == 0


def test_the_interface_is_found_once_in_the_background() -> None:
    asked, release = [], threading.Event()

    def find() -> InterfaceFacts:
        asked.append(1)
        release.wait(AMPLE_S)
        return InterfaceFacts(backend="gloo", name="eth0")

    probe = MachineProbe(interface=find)
    try:
        for _ in range(3):
            probe.note()
        assert probe.read().interface is None
    finally:
        release.set()
    join_own_threads("interface")
    probe.note()
    probe.close()
    assert probe.read().interface == InterfaceFacts(backend="gloo", name="eth0")
    assert asked == [1]


def test_a_probe_watches_collections_from_its_first_note_until_close() -> None:
    before = [*gc.callbacks]
    probe = MachineProbe()
    assert gc.callbacks == before
    probe.note()
    assert len(gc.callbacks) == len(before) + 1
    probe.close()
    assert gc.callbacks == before


def ended(process: "subprocess.Popen[bytes]") -> None:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_killed_and_failed_children_are_found_and_not_reaped() -> None:
    killed = subprocess.Popen(["sleep", "60"])
    failed, fine, alive = (subprocess.Popen(["sh", "-c", text]) for text in ("exit 3", "exit 0", "exec sleep 60"))
    try:
        killed.send_signal(signal.SIGKILL)
        for process in (killed, failed, fine):
            ended(process)
        own = {killed.pid, failed.pid, fine.pid, alive.pid}
        found = {child for child in ended_children() if child.pid in own}
        assert found == {EndedProcess(pid=killed.pid, signal="SIGKILL"), EndedProcess(pid=failed.pid, exit_code=3)}
    finally:
        alive.kill()
        codes = [process.wait() for process in (killed, failed, fine, alive)]
    assert codes[:3] == [-signal.SIGKILL, 3, 0]


def exit_badly(number: int) -> int:
    return os._exit(number) if number else 0  # type: ignore[func-returns-value]


def test_a_child_replaced_by_its_pool_is_remembered() -> None:
    watch = ChildWatch()
    threads = threading.active_count()
    try:
        with FORK.Pool(1) as pool:
            pid = pool.apply(os.getpid)
            watch.note()
            pool.apply_async(exit_badly, (7,))
            until(lambda: pool.apply_async(os.getpid).get(AMPLE_S) != pid)
            until(lambda: any(child.pid == pid for child in watch.read(0.0)))
            found = next(child for child in watch.read(0.0) if child.pid == pid)
            assert (found.exit_code, found.signal, found.is_replaced) == (7, "", True)
            assert found.ago_s is not None
            watch._next_s = 0.0
            watch.note()
            last = pool.apply(os.getpid)
        # Told to end by the pool, as it was closed.
        pool.join()
        assert [child.pid for child in watch.read(0.0) if child.pid == last] == []
    finally:
        watch.close()
    assert threading.active_count() == threads


def test_a_child_that_ends_at_once_is_noticed() -> None:
    """A pool has replaced it before the next look would have come."""
    watch = ChildWatch()
    try:
        watch.note()
        with FORK.Pool(1, initializer=exit_badly, initargs=(7,)):
            until(lambda: any(child.exit_code == 7 and child.is_replaced for child in watch.read(0.0)))
    finally:
        watch.close()


def live_under(watch: ChildWatch, codes: list[int]) -> set[str]:
    """Children that the watch has seen, and their parent seen end with these codes; the pipes that it had to them."""
    gate = FORK.Event()
    children = [FORK.Process(target=lambda code=code: exit_badly(gate.wait() and code)) for code in codes]
    for child in children:
        child.start()
    watch._next_s = 0.0
    watch.note()
    pipes = {os.readlink(f"/proc/self/fd/{child.sentinel}") for child in children}
    gate.set()
    for child in children:
        child.join()
    return pipes


def open_files() -> set[str]:
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_ended_children_keep_no_file_open() -> None:
    watch = ChildWatch()
    try:
        pipes = live_under(watch, [0, 7, 0])
        assert len(pipes) == 3
        until(lambda: len(watch.read(0.0)) == 1 and not pipes & open_files())
    finally:
        watch.close()


def test_children_that_have_succeeded_are_known_and_have_not_failed() -> None:
    watch = ChildWatch()
    try:
        live_under(watch, [0, 7])
        until(lambda: len(watch.done()) == 1 and len(watch.read(0.0)) == 1)
        assert {child.pid for child in watch.read(0.0)}.isdisjoint(watch.done())
    finally:
        watch.close()


def test_an_unreaped_child_is_listed_once() -> None:
    watch, child = ChildWatch(), subprocess.Popen(["sleep", "60"])
    try:
        watch.note()
        child.kill()
        until(lambda: any(seen.pid == child.pid and seen.ago_s is not None for seen in watch.read(0.0)))
        assert [seen.is_replaced for seen in watch.read(0.0) if seen.pid == child.pid] == [False]
    finally:
        child.wait()
        watch.close()


def test_a_forked_child_does_not_watch_its_children_for_its_parent() -> None:
    """They share what the parent's watch waits on."""
    watch, child, (told, tell) = ChildWatch(), subprocess.Popen(["sleep", "60"]), os.pipe()
    watch.note()
    if not (forked := os.fork()):
        if os.fork():
            os.read(told, 1)
        os._exit(0)
    try:
        child.kill()
        until(lambda: any(seen.pid == child.pid and seen.ago_s is not None for seen in watch.read(0.0)))
    finally:
        os.write(tell, b"x")
        os.waitpid(forked, 0)
        child.wait()
        watch.close()
        os.close(told)
        os.close(tell)


def test_without_a_child_list_there_are_no_ended_children(tmp_path: Path) -> None:
    assert ended_children(tmp_path) == ()
