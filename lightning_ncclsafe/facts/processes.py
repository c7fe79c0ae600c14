"""Processes as seen from outside, by another rank of the host or by an inspection."""

from dataclasses import dataclass

from lightning_ncclsafe.facts.collectives import Group
from lightning_ncclsafe.facts.frames import ExceptionFacts, Frame
from lightning_ncclsafe.facts.trainer import Progress

GONE = "gone"
"""The state of a process that no longer exists."""
ENDED = (GONE, "zombie", "dead")
"""States of a process that has ended."""
STOPPED = ("stopped", "tracing-stop")
"""States of a process that runs only once another process lets it."""
ANSWERING = ("running", "sleeping", "idle")
"""States in which a process can be asked for its stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSeen:
    """Where a rank was when it last wrote that down, about a quarter of a second before it ended.

    Attributes:
        progress: The progress of its Trainer.
        stack: The user's frames below the Trainer, outermost first; empty if it was making progress.
        stayed: How many of these, from the outermost on, are in functions that the rank had not been seen to leave
            since its last progress.
    """

    progress: Progress
    stack: tuple[Frame, ...] = ()
    stayed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCall:
    """A statement in a function of the user's that ends the process that executes it, at once or by a timer.

    Attributes:
        code: What it calls or raises, as in the source: ``"os._exit(124)"``.
        place: ``"file:line in function"``.
        status: The status with which the process exits; None if it is no constant, or the process is ended by a signal.
        signal: The signal that the process sends itself, or gets from a timer, ``"SIGABRT"``; empty for an exit.
        raises: Whether it raises SystemExit, which ends the process only once it has left the main thread's program.
        left_at: ``"file:line in function"`` of the only ``return`` of a function that has set the timer and cancels it
            later; empty if there is none, or several.
    """

    code: str
    place: str
    status: int | None = None
    signal: str = ""
    raises: bool = False
    left_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process as another process on the same host sees it: a peer rank that may be silent, or a loader worker.

    Attributes:
        pid: Process id.
        rank: Global rank; -1 for a process that is not a rank.
        state: ``"running"``, ``"sleeping"``, ``"stopped"``, ``"tracing-stop"``, ``"disk-sleep"``, ``"zombie"`` or
            ``"gone"`` (psutil's words, and ``"gone"`` for a process that no longer exists).
        wait_channel: Kernel function in which it sleeps (``/proc/PID/wchan``); empty if unreadable.
        cpu_s: CPU time that it has used, seconds.
        rss_bytes: Resident memory.
        swap_bytes: How much of it is swapped out.
        memory_growth_bytes_per_s: How fast its resident memory grew between two looks; None after a single one.
        swap_growth_bytes_per_s: How fast its swapped-out memory grew between them.
        stack: Its main thread's Python stack, outermost first, if it could be read from outside.
        gil_held: Whether its Python did not answer although the process runs, because something holds the GIL.
        ended_by: The signal that ended it, ``"SIGKILL"``, ``"SIGSEGV"``; empty if it is alive, or if that is unknown.
            If the process caused the signal itself, ``stack`` is where its main thread was.
        thread_stack: Stack of another thread that was in a collective, called by the user's code, when it ended.
        said: Why it aborted itself: the last lines on its stderr. Other ranks may write to the same file.
        exit_code: The status with which it exited; None if it is alive, or if that is unknown.
        raised: The exception that left its program, outside of the Trainer, or, of a loader's worker, the last one that
            could not be sent to its rank; None if there is none, or it is unknown.
        last_seen: Where it was shortly before it ended; None if it is alive, or if that is unknown.
        ran_share: Share of a core that its main thread got between two looks, 0 to 1.
        queued_share: Share of the time between them in which it was ready to run but waited for a core.
        asleep_s: Of a child process, for how many seconds all of its threads have been asleep, waiting for one another;
            0 at the first look that finds them so; None if one runs, has run since, or may wait for something else.
        stopping_at: If a signal has stopped it, ``"file:line in main"`` of the calls that stop a process, in the
            programs of this host's ranks and of the processes that they have started.
    """

    pid: int
    rank: int = -1
    state: str = ""
    wait_channel: str = ""
    cpu_s: float | None = None
    rss_bytes: int | None = None
    swap_bytes: int | None = None
    memory_growth_bytes_per_s: int | None = None
    swap_growth_bytes_per_s: int | None = None
    stack: tuple[Frame, ...] = ()
    thread_stack: tuple[Frame, ...] = ()
    gil_held: bool = False
    ended_by: str = ""
    said: str = ""
    exit_code: int | None = None
    raised: ExceptionFacts | None = None
    last_seen: LastSeen | None = None
    ran_share: float | None = None
    queued_share: float | None = None
    asleep_s: float | None = None
    stopping_at: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProcess:
    """A process that a rank's main thread waits for, or one that this one has started.

    Attributes:
        pid: Process id.
        parent: Process id of the process that has started it.
        command: Its program and what that runs: ``"python convert.py"``; empty if unreadable.
        state: ``"sleeping"``, ``"running"``, …; empty if unknown.
        wait_channel: Kernel function it sleeps in; empty where unknown.
        age_s: Seconds since it was started; None if unknown.
    """

    pid: int
    parent: int
    command: str = ""
    state: str = ""
    wait_channel: str = ""
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """A process that holds a file lock; if the lock is a file's existence, a process that has the file open.

    Attributes:
        pid: Process id.
        command: Its program and what that runs: ``"python train.py"``; empty if unreadable.
        parents: Process ids of its parent, its parent's parent and so on.
    """

    pid: int
    command: str = ""
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLockFacts:
    """The lock on a file that a rank's main thread waits for.

    Attributes:
        path: Path of the file.
        holders: Who holds the lock, as far as this host shows; empty if it is held on another host or in another
            container, or left behind.
        is_certain: Whether the main thread is known to wait for it: in a system call, or in a library for locks.
            Otherwise it sleeps, and has the file open on which another process has a lock.
        by_existence: Whether the lock is the file's existence: the wait is over when the file is gone.
        age_s: Seconds since such a file was written.
        is_on_network: Whether the file is on a network file system, where ranks on other hosts may lock it, too.
        left_open_at: ``"file:line in open_run"`` of a change of a database after which the user's function returns, and
            may leave the transaction open; empty if there are several such functions, if the main thread has entered
            it, or if it waits for no database.
    """

    path: str
    holders: tuple[LockHolder, ...] = ()
    is_certain: bool = True
    by_existence: bool = False
    age_s: float | None = None
    is_on_network: bool = False
    left_open_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadLockFacts:
    """The thread lock that a rank's main thread waits for, and the thread that holds it.

    Attributes:
        lock: The lock as the source names it, ``"self.lock"``.
        thread: Name of the thread that holds it.
        is_own: Whether that is the main thread itself.
        taken_at: The line that acquired it; None if unknown.
        stack: Where that thread is now, outermost frame first.
    """

    lock: str
    thread: str = ""
    is_own: bool = False
    taken_at: Frame | None = None
    stack: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedThread:
    """The thread of its own process that a rank's main thread waits for: for its end, or for a task that it runs.

    Attributes:
        name: Its name.
        stack: Where it is, outermost frame first.
    """

    name: str
    stack: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledActivity:
    """What the main thread of a rank was doing in some of the samples of its stack.

    Attributes:
        doing: In words: ``"user code"``, ``"a collective"``, ``"the dataloader"``.
        place: ``"file:line in function"`` of the deepest line in the user's own code; empty if there is none.
        looks: The number of samples.
    """

    doing: str
    place: str = ""
    looks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlace:
    """Where a thread other than the main one is in the user's code.

    Attributes:
        name: Name of the thread.
        frame: Its deepest frame in the user's code.
    """

    name: str
    frame: Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionFacts:
    """How a rank's process was inspected from outside.

    Attributes:
        looks: How often its stack was read.
        over_s: Seconds between the first and the last look.
        moved: Whether its main thread changed what it does between looks; None if unknown.
        slept_s: Seconds for which its main thread had not run at the last look, by the kernel's counters; None if
            unknown.
        whereabouts: What it was doing, the most frequent first.
        native: Native functions below its last Python frame, outermost first; empty if they were not read.
        threads: Its other threads that are in the user's code; the first 4.
        group: The process group whose collective it waited in, by name and members; None if unknown.
    """

    looks: int = 0
    over_s: float = 0.0
    moved: bool | None = None
    slept_s: float | None = None
    whereabouts: tuple[SampledActivity, ...] = ()
    native: tuple[str, ...] = ()
    threads: tuple[ThreadPlace, ...] = ()
    group: Group | None = None

    @property
    def idle_s(self) -> float:
        """Seconds for which it has made no progress, as far as known; 0 if it moves."""
        return 0.0 if self.moved else max(self.over_s if self.moved is False else 0.0, self.slept_s or 0.0)
