"""The kernel's counters of a process's main thread: its time on a core, and its waits for a core and for storage."""

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_ncclsafe.probes.absent import file_text, line_after, or_none
from lightning_ncclsafe.probes.process.stacks import training_thread_number

_PROC = Path("/proc")
_ASLEEP, _BLOCKED, _RUNNING = "sleeping", "disk-sleep", "running"
# A thread that waits for the GIL wakes up 20 times meanwhile, or fewer on a busy host, and runs for 0.05 ms each time.
_WAITS_S, _LOOKS, _LEAST_WOKEN, _MOST_RUN_S = 0.1, 5, 10, 0.00015
# On a starved host it wakes up only a few times, and is looked at for several such periods.
_MOST_PERIODS, _FEW_WOKEN = 4, 2
# A thread that has run for longer than this meanwhile, or waited for a core so long, does more than wait for the GIL.
_WORKS_S, _QUEUES_S = 0.005, 0.05
# psutil's names; psutil reads them for whole processes only, and more slowly.
_STATES = {
    "R": _RUNNING,
    "S": _ASLEEP,
    "D": _BLOCKED,
    "T": "stopped",
    "t": "tracing-stop",
    "Z": "zombie",
    "I": "idle",
    "P": "parked",
}
# Numbers of system calls, those of one kind under one name: read and readv, nanosleep and clock_nanosleep.
_CALLS = {
    "x86_64": {
        **{0: "read", 19: "read", 1: "write", 20: "write"},
        **{61: "wait4", 72: "fcntl", 73: "flock", 23: "select", 270: "select", 35: "sleep", 230: "sleep"},
    },
    "aarch64": {
        **{63: "read", 65: "read", 64: "write", 66: "write"},
        **{260: "wait4", 25: "fcntl", 32: "flock", 72: "select", 101: "sleep", 115: "sleep"},
    },
}
# Fields of /proc/PID/stat after the name in brackets, which may contain anything.
_STATE_FIELD, _MAJOR_FAULTS_FIELD, _STARTED_FIELD, _CORE_FIELD = 0, 9, 19, 36


@dataclass(frozen=True, slots=True)
class ThreadLook:
    """The state of the main thread at one moment; the counts begin with the thread and only grow.

    Attributes:
        state: ``"running"``, ``"sleeping"``, ``"disk-sleep"``, …; empty where unknown.
        wait_channel: Kernel function it sleeps in; empty where unknown.
        ran_s: Processor time, seconds.
        queued_s: Seconds in the run queue, waiting for a core.
        preempted: Involuntary context switches.
        major_faults: Page faults that had to wait for storage.
    """

    state: str = ""
    wait_channel: str = ""
    ran_s: float | None = None
    queued_s: float | None = None
    preempted: int | None = None
    major_faults: int | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether it is in uninterruptible sleep."""
        return self.state == _BLOCKED

    @property
    def is_interruptible(self) -> bool:
        """Whether it sleeps, and a signal would wake it up."""
        return self.state == _ASLEEP

    @property
    def is_running(self) -> bool:
        """Whether it runs, or waits for a core."""
        return self.state == _RUNNING


def look_at_main_thread(pid: int | None = None, proc: Path = _PROC, *, thread: int | None = None) -> ThreadLook:
    """One look at a process's main thread, by default this one's, or at another thread of it; takes about 0.1 ms."""
    # The main thread has the process's id.
    number = str(os.getpid() if pid is None else pid)
    folder = proc / number / "task" / (number if thread is None else str(thread))
    fields = stat_fields(folder)
    ran_s, queued_s = _turns_s(folder)
    return ThreadLook(
        state=_STATES.get(fields[_STATE_FIELD], "") if fields else "",
        wait_channel=wait_channel(folder),
        ran_s=ran_s,
        queued_s=queued_s,
        preempted=or_none(lambda: int(line_after(folder / "status", "nonvoluntary_ctxt_switches:"))),
        major_faults=or_none(lambda: int(fields[_MAJOR_FAULTS_FIELD])),
    )


def system_call(pid: int | None = None) -> tuple[str, tuple[int, ...]]:
    """The system call that the main thread is in, with its arguments; empty if it is in none that is known here.

    One of ``"read"``, ``"write"``, ``"wait4"``, ``"fcntl"``, ``"flock"``, ``"select"`` and ``"sleep"``. That of another
    process is known only to those who may debug it.
    """
    folder = _PROC / str(pid or "self") / "task" / str(pid or training_thread_number())
    words = file_text(folder / "syscall").split()
    # "running" has no number.
    number = or_none(lambda: int(words[0])) if len(words) > 6 else None
    name = _CALLS.get(platform.machine(), {}).get(number, "") if number is not None else ""
    return (name, tuple(int(word, 16) for word in words[1:])) if name else ("", ())


def slept_s(pid: int, proc: Path = _PROC) -> float | None:
    """Seconds since the main thread of another process ran last; None where the kernel does not report it."""
    return or_none(lambda: _slept_s(proc / str(pid) / "task" / str(pid), proc))


def started_at(pid: int) -> int | None:
    """When a process was started, in ticks of the kernel's clock; None if there is none.

    With its id, this identifies a process. Unlike wall-clock time, it cannot be set.
    """
    return or_none(lambda: int(stat_fields(_PROC / str(pid))[_STARTED_FIELD]))


def thread_ran_s(thread_id: int) -> float:
    """CPU seconds of a thread of this process; 0 if there is none, or that is unreadable."""
    own, _ = or_none(lambda: _turns_s(_PROC / "self" / "task" / str(thread_id))) or (None, None)
    return own or 0.0


def look_at_others(pid: int, proc: Path = _PROC) -> dict[int, ThreadLook]:
    """One look at each thread of a process besides its main one, by the kernel's numbers of them."""
    numbers = or_none(lambda: os.listdir(proc / str(pid) / "task")) or []
    return {int(number): look_at_main_thread(pid, proc, thread=int(number)) for number in numbers if number != str(pid)}


def at_work(before: Mapping[int, ThreadLook], now: Mapping[int, ThreadLook]) -> dict[int, float]:
    """The threads that have worked between two looks 0.1 s apart, or waited for a core, with the CPU seconds they had.

    One that only asks for the GIL wakes up every few milliseconds, and does neither.
    """
    begun = ThreadLook(ran_s=0.0, queued_s=0.0)
    turns = {number: _turns_between(before.get(number, begun), look) for number, look in now.items()}
    return {
        number: ran_s
        for number, (ran_s, queued_s) in turns.items()
        if ran_s > _WORKS_S or queued_s > _QUEUES_S or (now[number].is_running and not ran_s)
    }


def _turns_between(before: ThreadLook, now: ThreadLook) -> tuple[float, float]:
    return (now.ran_s or 0.0) - (before.ran_s or 0.0), (now.queued_s or 0.0) - (before.queued_s or 0.0)


def waits_for_gil(pid: int, threads: Iterable[int], proc: Path = _PROC) -> bool:
    """Whether one of some Python threads of another process waits for the GIL and does not get it.

    Takes 0.1 s, and up to 0.4 s on a starved host. Such a thread does nothing but wake up every 5 ms
    (``sys.getswitchinterval``), to ask the thread that holds the GIL to release it. One that executes bytecode does so
    at once.

    Args:
        pid: The process.
        threads: The kernel's numbers of the threads; they must be ones that never wait for a lock at such a pace.
    """
    folders = [proc / str(pid) / "task" / str(thread) for thread in threads]
    looks = [_look_at(folders)]
    for _ in range(_MOST_PERIODS):
        for _ in range(_LOOKS - 1):
            time.sleep(_WAITS_S / (_LOOKS - 1))
            looks.append(_look_at(folders))
        if any(_is_of_gil(each) for each in zip(*looks, strict=True)):
            return True
        if not any(_woken_between(each[-_LOOKS], each[-1]) >= _FEW_WOKEN for each in zip(*looks, strict=True)):
            break
    return False


class _GilLook(NamedTuple):
    """One look at a thread that may wait for the GIL; None where unknown."""

    ran_s: float | None
    woken: int | None
    channel: str


def _look_at(folders: Iterable[Path]) -> list[_GilLook]:
    return [_GilLook(_turns_s(folder)[0], times_woken(folder), wait_channel(folder)) for folder in folders]


def _woken_between(before: _GilLook, now: _GilLook) -> int:
    return now.woken - before.woken if now.woken is not None and before.woken is not None else 0


def _is_of_gil(looks: Sequence[_GilLook]) -> bool:
    before, now = looks[0], looks[-1]
    if before.ran_s is None or now.ran_s is None:
        return False
    woken = _woken_between(before, now)
    # Python waits for the GIL by a futex. The channel is empty while the thread runs.
    channels = {look.channel for look in looks if look.channel}
    by_futex = bool(channels) and all("futex" in channel for channel in channels)
    return by_futex and woken >= _LEAST_WOKEN and now.ran_s - before.ran_s < woken * _MOST_RUN_S


def times_woken(folder: Path) -> int | None:
    """How often a process's main thread, or another thread, has been woken up; None where unknown."""
    return or_none(lambda: int(line_after(folder / "status", "voluntary_ctxt_switches:")))


def wait_channel(folder: Path) -> str:
    """The kernel function that a process or thread sleeps in; empty if it does not sleep, or that is unreadable."""
    name = file_text(folder / "wchan")
    return "" if name == "0" else name


def _slept_s(folder: Path, proc: Path) -> float:
    fields = stat_fields(folder)
    own = os.sched_getaffinity(0)
    # Every core has its own clock, which leaves out the time of hypervisors and interrupts: both times have to be
    # those of the core on which the thread ran last.
    os.sched_setaffinity(0, {int(fields[_CORE_FIELD])})
    try:
        lines = [line_after(one / "sched", "se.exec_start") for one in (proc / "thread-self", folder)]
        now_ms, then_ms = (float(line.rpartition(":")[2]) for line in lines)
        return max(now_ms - then_ms, 0.0) / 1e3
    finally:
        os.sched_setaffinity(0, own)


def stat_fields(folder: Path) -> list[str]:
    """The fields of a process or thread from the third, its state, on; none if there is no such process."""
    # The name, before these, may contain anything.
    return file_text(folder / "stat").rpartition(")")[2].split()


def _turns_s(folder: Path) -> tuple[float | None, float | None]:
    """Nanoseconds on a core and in the queue for one; a kernel without CONFIG_SCHED_INFO has no such file."""
    words = file_text(folder / "schedstat").split()
    return (int(words[0]) / 1e9, int(words[1]) / 1e9) if len(words) == 3 else (None, None)
