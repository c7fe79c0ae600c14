"""Ending a run: the process exits once the report is written, and until then it neither trains nor saves.

Process groups are not aborted. After an abort, waits in NCCL return as if nothing had happened. What was queued behind
the aborted collective, such as an optimizer's step, runs on partial sums, and the next line may save the result. An
abort of several communicators may also deadlock, with locks that Python's exit needs. A process that leaves by
``os._exit`` has no such next line, and no ``atexit`` handlers, destructors or threads to wait for.

Others may still abort: PyTorch's own watchdog, depending on ``TORCH_NCCL_ASYNC_ERROR_HANDLING``, or a broken
connection. So the Trainer's thread is held: it returns from its wait, but never reaches the next line.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import Exchange, ExchangeError, poll_interval_s, wait_for, wait_for_keys
from lightning_ncclsafe.probes.rank_info import RankInfo

EXIT_CODE = 124
"""Exit status of a process that the guard has ended, the same as that of ``timeout(1)``."""

# From when a rank learns that the limit is reached; includes the time for the last report.
AT_LIMIT_S = 27.0
# Everything after the report takes less than this.
_LEAVES_S = 12.0
# How long a process has to exit after its Trainer has raised our error and its main thread has ended.
_EXITS_S = 30.0
# How long the process that hosts the store waits for the others to leave first.
_OTHERS_LEAVE_S = 3.0
# How long loggers' storage has; whatever is left stays in local staging.
_LOGS_S = 5.0
# How long each last call to storage or other processes has; such a call may never return.
_LAST_STEP_S = 1.0
_THREAD = "ncclsafe-ending"


class Ending:
    """Knows whether a run is being ended. Everything that saves or trains checks it; once closed, it stays closed.

    A copy, for instance in another process, belongs to another run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._make_error: Callable[[], CollectiveTimeoutError] | None = None
        self._thread: int | None = None
        self._partial: set[Path] = set()
        self._deadline = _Deadline()

    def __reduce__(self) -> Any:
        return Ending, ()

    def note_thread(self) -> None:
        """Notes that the Trainer runs in the calling thread: this process may be ended.

        Raises:
            CollectiveTimeoutError: The run has been ended before.
        """
        self.check()
        self._thread = threading.get_ident()

    @property
    def is_closed(self) -> bool:
        """Whether the run is being ended, or has been."""
        return self._make_error is not None

    def close(self, make_error: Callable[[], CollectiveTimeoutError]) -> None:
        """From now on, nothing is saved, and no step is made.

        Args:
            make_error: Makes the error that is raised in every attempt.
        """
        # A checkpoint that is just being renamed is completed; the next one is refused.
        with self._lock:
            self._make_error = self._make_error or make_error

    def check(self) -> None:
        """Called before everything that saves or trains.

        Raises:
            CollectiveTimeoutError: The run is being ended.
        """
        if self._make_error is not None:
            raise self._make_error()

    @contextmanager
    def written(self, path: str | Path) -> Iterator[str | Path]:
        """Gives a temporary path for a checkpoint, which is renamed when complete, unless the run is being ended.

        Args:
            path: The final path. Anything but a local file (a bucket, a folder, a device) is written to directly.

        Raises:
            CollectiveTimeoutError: The run is being ended. The file is as it was before.
        """
        self.check()
        if "://" in os.fspath(path) or (os.path.lexists(path) and not os.path.isfile(path)):
            yield path
            return self.check()
        # In the same folder: a rename within a file system is atomic.
        partial_path = Path(path).absolute().parent / f".{uuid.uuid4().hex}.ncclsafe-partial"
        self._partial.add(partial_path)
        try:
            yield partial_path
            with self._lock:
                self.check()
                # In tests of a program, the function that writes may be a mock.
                if partial_path.exists():
                    os.replace(partial_path, path)
        finally:
            with suppress(OSError):
                partial_path.unlink(missing_ok=True)
            self._partial.discard(partial_path)

    def exit_within(self, seconds: float) -> None:
        """Ends this process after this many seconds, whatever it does then; an earlier deadline stays in force."""
        if self._thread is not None:
            self._deadline.set(seconds)

    def lift_deadline(self) -> None:
        """Lifts the deadline of :meth:`exit_within`: the run continues."""
        self._deadline.lift()

    def exit_after_main_thread(self) -> None:
        """Lets the process exit by itself, but limits what delays that: other threads, ``atexit``, destructors."""
        if self._thread is None:
            return
        process = os.getpid()

        def limit_exit() -> None:
            if os.getpid() == process:
                self._deadline.set(_EXITS_S)

        def watch() -> None:
            threading.main_thread().join()
            limit_exit()

        # Runs after other threads have ended, and before handlers that were registered earlier.
        atexit.register(limit_exit)
        SideThread(_THREAD).begin(watch)

    def hold(self) -> None:
        """Stops the Trainer's thread: as soon as it executes Python code, it waits for the process to exit."""
        if self._thread is None:
            return
        if self._thread == threading.main_thread().ident:
            ctypes.pythonapi.Py_AddPendingCall(_STAY, None)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Held))

    def stay(self) -> None:
        """Holds the calling thread, which is the Trainer's, until the process exits."""
        if self._thread is not None:
            _stay()

    def clear_partial(self) -> None:
        """Removes checkpoints that were written and never renamed."""
        for path in [*self._partial]:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _stay() -> NoReturn:
    # Python's signal handlers run in the main thread, where they may raise, or save.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        with suppress(BaseException):
            threading.Event().wait()


# Kept here, as it must exist for as long as it may be called.
_STAY = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: _stay())


class _Held(BaseException):
    """Raised in a thread that is not the main one. Making it never returns, so that no handler of it ever runs."""

    def __new__(cls, *args: object) -> "_Held":
        _stay()


class _Deadline:
    """When this process exits at the latest. Enforced twice: by a thread, and by a timer that does not need Python."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._thread: threading.Timer | None = None
        self._timer: _ExitTimer | None = None

    def set(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        if self._at is not None and self._at <= at:
            return
        self.lift()
        self._at = at
        # Each of them may be unavailable on some systems or at some moments.
        with suppress(Exception):
            self._timer = self._timer or _ExitTimer()
            self._timer.set(seconds)
        with suppress(RuntimeError):
            self._thread = threading.Timer(seconds, os._exit, (EXIT_CODE,))
            self._thread.daemon = True
            self._thread.start()

    def lift(self) -> None:
        self._at = None
        if self._thread is not None:
            self._thread.cancel()
        if self._timer is not None:
            self._timer.set(0.0)


class _SigEvent(ctypes.Structure):
    """Linux's ``struct sigevent``, with the fields for starting a thread."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("_padding", ctypes.c_char * 32),
    )


class _ExitTimer:
    """A timer of the C library that calls ``_exit`` in a thread without Python: the GIL may be held.

    Raises:
        OSError, AttributeError: The system has no such timers, as macOS.
    """

    _SIGEV_THREAD = 2

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("only Linux has such timers")
        self._libc = ctypes.CDLL(None, use_errno=True)
        event = _SigEvent(
            value=EXIT_CODE,
            notify=self._SIGEV_THREAD,
            function=ctypes.cast(self._libc._exit, ctypes.c_void_p).value,
        )
        self._id = ctypes.c_void_p()
        if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def set(self, seconds: float) -> None:
        whole, rest = divmod(seconds, 1.0)
        # struct itimerspec: no interval, and the time until it fires; zero disarms it.
        times = (ctypes.c_long * 4)(0, 0, int(whole), int(rest * 1e9))
        if self._libc.timer_settime(self._id, 0, ctypes.byref(times), None):
            raise OSError(ctypes.get_errno(), "timer_settime")


def _try_for(seconds: float, act: Callable[[], None]) -> None:
    """Runs something in a thread and waits this long for it; it may fail, or never return."""
    with suppress(BaseException):
        SideThread(_THREAD).call(act, seconds)


def end_frozen(peers: Iterable[RankInfo], say: Callable[[str], None]) -> None:
    """Kills processes of this host that cannot end themselves, and that nothing else may end: one may be the launcher.

    Args:
        peers: Ranks that are stopped, or whose GIL is held forever.
    """
    for peer in peers:
        with suppress(psutil.Error, OSError):
            process = psutil.Process(peer.pid)
            is_same = not peer.started or abs(process.create_time() - peer.started) < 1.0
            if is_same and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                say(f"rank {peer.rank} cannot end itself; its process {peer.pid} was killed")


def end_run(
    *,
    ending: Ending,
    exchange: Exchange,
    rank: int,
    world_size: int,
    write_logs: Callable[[float], None],
    logging_ranks: Sequence[int] = (),
    end_frozen: Callable[[], None] = lambda: None,
    before_exit: Callable[[], None],
    may_others_come: Callable[[], bool] = lambda: False,
) -> None:
    """Ends this rank's part of the run, from a side thread: the process exits within 12 s.

    Args:
        ending: Closed already: nothing is saved any more.
        write_logs: Writes what loggers were given to storage, within the seconds that it is given.
        logging_ranks: Ranks that have such loggers.
        end_frozen: Ends ranks that cannot end themselves; after logs are written, as launchers end all ranks with one.
        before_exit: Called before the process exits; its failure is ignored.
        may_others_come: Whether ranks are still starting, and have to learn that the others have given up.
    """
    ending.exit_within(_LEAVES_S)
    ending.hold()
    _write_logs(exchange, write_logs, rank=rank, logging_ranks=logging_ranks)
    end_frozen()
    say_goodbye(exchange, rank)
    if stores.hosts_store(rank):
        wait_for_others(exchange, rank, world_size)
    _try_for(_LAST_STEP_S, ending.clear_partial)
    _try_for(_LAST_STEP_S, before_exit)
    _try_for(_LAST_STEP_S, lambda: _close(exchange, may_others_come))
    _try_for(_LAST_STEP_S, _flush)
    os._exit(EXIT_CODE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _close(exchange: Exchange, may_others_come: Callable[[], bool]) -> None:
    # A rank that has just been killed takes a moment to disappear.
    if wait_for(lambda: not may_others_come(), deadline_s=_LAST_STEP_S / 2):
        exchange.close()


def _write_logs(exchange: Exchange, write: Callable[[float], None], *, rank: int, logging_ranks: Sequence[int]) -> None:
    """Writes logs, and waits until all ranks have: launchers end all ranks once the first one leaves."""
    deadline = time.monotonic() + _LOGS_S
    # The thread that is held may itself hold a lock of the loggers.
    _try_for(_LOGS_S, lambda: write(_LOGS_S))
    keys = [f"logs/{other}" for other in logging_ranks]
    with suppress(ExchangeError):
        if rank in logging_ranks:
            exchange.set(f"logs/{rank}", b"")
        wait_for_keys(exchange, keys, deadline_s=deadline - time.monotonic())


def say_goodbye(exchange: Exchange, rank: int) -> None:
    """Announces that this rank no longer needs the exchange."""
    with suppress(ExchangeError):
        exchange.set(goodbye_key(rank), b"")


def goodbye_key(rank: int) -> str:
    """The key under which a rank announces that."""
    return f"left/{rank}"


@marked(Mark.STORE)
def wait_for_others(exchange: Exchange, rank: int, world_size: int) -> None:
    """Waits, at most 3 s, until the other ranks no longer need the store."""
    others = [goodbye_key(other) for other in range(world_size) if other != rank]
    with suppress(ExchangeError):
        # Ranks are still starting.
        poll_s = poll_interval_s(world_size)
        wait_for_keys(exchange, others, deadline_s=_OTHERS_LEAVE_S, poll_s=poll_s / 10, longest_poll_s=poll_s)
