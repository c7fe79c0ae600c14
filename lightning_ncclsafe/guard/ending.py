"""Ending a run: its process exits once the report is written, and until then it neither trains nor saves.

Process groups are not aborted. After an abort, waits in NCCL return as if nothing had happened, what was queued behind
the aborted collective, an optimizer's step for instance, runs on partial sums, and the next line may save the result.
An abort of several communicators may also deadlock, with locks that Python's exit needs. A process that leaves by
``os._exit`` has no such next line, and no handlers of ``atexit``, destructors or threads to wait for.

Others may abort all the same: PyTorch's own watchdog, as ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` orders, or a broken
connection. So the Trainer's thread is held meanwhile: it comes back from its wait, and not to the next line.
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
from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import Exchange, ExchangeError, poll_interval_s, wait_for, wait_for_keys
from lightning_ncclsafe.probes.rank import Card

EXIT_CODE = 124
"""Exit status of a process that the guard has ended; that of ``timeout(1)``."""

# From the moment at which a rank learns that the limit is reached, with the last report still to be written.
AT_LIMIT_S = 27.0
# What is left to do once the report is written takes less than that.
_LEAVES_S = 12.0
# What a process whose Trainer has raised our error is given to exit, once its main thread has ended.
_EXITS_S = 30.0
# What the process that hosts the store gives the others to leave before it.
_OTHERS_LEAVE_S = 3.0
# What loggers' storage is given; what it does not take then stays in local staging.
_LOGS_S = 5.0
# What is asked of storage or of other processes in the end, and may never return.
_LAST_STEP_S = 1.0


class Ending:
    """Whether a run is being ended, and the gate that everything that saves or trains has to pass: it closes for good.

    A copy, in another process for instance, belongs to another run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._make_error: Callable[[], CollectiveTimeoutError] | None = None
        self._thread: int | None = None
        self._partial: set[Path] = set()
        self._deadline = _Deadline()

    def __reduce__(self) -> Any:
        return Ending, ()

    def is_called_here(self) -> None:
        """The Trainer runs in the calling thread, and in this process, which may be ended.

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
        """From now on nothing is saved, and no step is made.

        Args:
            make_error: Makes what is raised where something is tried.
        """
        # Whoever is just giving a checkpoint its name has finished; the next one is refused.
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
        """Where to write a checkpoint, which gets its name when it is whole, unless the run is being ended by then.

        Args:
            path: Its name. What is no local file, as a bucket, a folder or a device, is written to as it is.

        Raises:
            CollectiveTimeoutError: The run is being ended. What has been there before is there still.
        """
        self.check()
        if "://" in os.fspath(path) or (os.path.lexists(path) and not os.path.isfile(path)):
            yield path
            return self.check()
        # In the same folder: to rename within a file system takes effect whole or not at all.
        beside = Path(path).absolute().parent / f".{uuid.uuid4().hex}.ncclsafe-partial"
        self._partial.add(beside)
        try:
            yield beside
            with self._lock:
                self.check()
                # Whoever tests a program may have put a mock in the place of what writes.
                if beside.exists():
                    os.replace(beside, path)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            self._partial.discard(beside)

    def exit_within(self, seconds: float) -> None:
        """Ends this process after so many seconds, whatever it does then; an earlier deadline stays."""
        if self._thread is not None:
            self._deadline.set(seconds)

    def go_on(self) -> None:
        """The run goes on, after all."""
        self._deadline.lift()

    def exit_after_main_thread(self) -> None:
        """The process is to exit by itself, whatever waits at its end: other threads, ``atexit``, destructors."""
        if self._thread is None:
            return
        process = os.getpid()

        def limit_exit() -> None:
            if os.getpid() == process:
                self._deadline.set(_EXITS_S)

        def watch() -> None:
            threading.main_thread().join()
            limit_exit()

        # After other threads, and before handlers that others have registered until now.
        atexit.register(limit_exit)
        _in_background(watch)

    def hold(self) -> None:
        """Stops the Trainer's thread: it waits for the process to exit wherever it is next in Python."""
        if self._thread is None:
            return
        if self._thread == threading.main_thread().ident:
            ctypes.pythonapi.Py_AddPendingCall(_STAY, None)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Held))

    def stay(self) -> None:
        """Keeps the calling thread, which is the Trainer's, until the process has exited."""
        if self._thread is not None:
            _stay()

    def clear_partial(self) -> None:
        """Removes what has been written and was never given its name."""
        for path in [*self._partial]:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _stay() -> NoReturn:
    # Their handlers in Python run in the main thread, where they may raise, or save. Of systems without it, Windows.
    with suppress(AttributeError):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        with suppress(BaseException):
            threading.Event().wait()


# Kept here, as it has to be there for as long as it may be called.
_STAY = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: _stay())


class _Held(BaseException):
    """Raised in a thread that is not the main one: to make it is to stay, so that no handler of it ever runs."""

    def __new__(cls, *args: object) -> "_Held":
        _stay()


class _Deadline:
    """When this process exits, at the latest. Kept twice: by a thread, and by a timer that does without Python."""

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
        # For each of them there are systems, and hours, at which it cannot be had.
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
    """Linux's ``struct sigevent``, as far as a thread is to be started."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("_padding", ctypes.c_char * 32),
    )


class _ExitTimer:
    """A timer of the C library that calls ``_exit`` in a thread without Python: the interpreter's lock may be held.

    Raises:
        OSError, AttributeError: There is none, as on macOS.
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
        # struct itimerspec: an interval, which is none, and the time until it fires; zero is never.
        times = (ctypes.c_long * 4)(0, 0, int(whole), int(rest * 1e9))
        if self._libc.timer_settime(self._id, 0, ctypes.byref(times), None):
            raise OSError(ctypes.get_errno(), "timer_settime")


def _in_background(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, name="ncclsafe-ending", daemon=True)
    thread.start()
    return thread


def _try_for(seconds: float, act: Callable[[], None]) -> None:
    """What is left to do may fail, and may never return; it is not waited for then."""

    def attempt() -> None:
        with suppress(Exception):
            act()

    with suppress(RuntimeError):
        _in_background(attempt).join(seconds)


def end_frozen(cards: Iterable[Card], say: Callable[[str], None]) -> None:
    """Kills processes of this host that cannot end themselves, and that nothing else may end: one may be the launcher.

    Args:
        cards: Of ranks that are stopped, or whose interpreter's lock is held for good.
        say: Prints a line to the user.
    """
    for card in cards:
        with suppress(psutil.Error, OSError):
            process = psutil.Process(card.pid)
            is_same = not card.started or abs(process.create_time() - card.started) < 1.0
            if is_same and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                say(f"rank {card.rank} cannot end itself; its process {card.pid} was killed")


def end_run(
    *,
    ending: Ending,
    make_error: Callable[[], CollectiveTimeoutError],
    exchange: Exchange,
    rank: int,
    world_size: int,
    write_logs: Callable[[float], None],
    logging_ranks: Sequence[int] = (),
    end_frozen: Callable[[], None] = lambda: None,
    before_exit: Callable[[], None],
    may_others_come: Callable[[], bool] = lambda: False,
) -> None:
    """Ends this rank's part of the run, from a side thread: the process exits, at the latest 12 s from now.

    Args:
        ending: Of this run.
        make_error: Makes what is raised where something is saved meanwhile.
        exchange: What the ranks share.
        rank: This rank.
        world_size: Number of ranks.
        write_logs: Brings what loggers were given to storage, within so many seconds.
        logging_ranks: Ranks that have such loggers.
        end_frozen: Ends ranks that cannot end themselves; not before logs are written, as launchers end all with one.
        before_exit: What is left to do for this process before it exits; its failure is ignored.
        may_others_come: Whether ranks are still on their way, and have to find that the others have given up.
    """
    ending.exit_within(_LEAVES_S)
    ending.close(make_error)
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
    # A rank that has just been killed takes a moment to be gone.
    if wait_for(lambda: not may_others_come(), deadline_s=_LAST_STEP_S / 2):
        exchange.close()


def _write_logs(exchange: Exchange, write: Callable[[float], None], *, rank: int, logging_ranks: Sequence[int]) -> None:
    """No rank leaves before all have written: launchers end the others with the first."""
    deadline = time.monotonic() + _LOGS_S
    # The thread that is held may hold a lock of theirs.
    _try_for(_LOGS_S, lambda: write(_LOGS_S))
    keys = [f"logs/{other}" for other in logging_ranks]
    with suppress(ExchangeError):
        if rank in logging_ranks:
            exchange.set(f"logs/{rank}", b"")
        wait_for_keys(exchange, keys, deadline_s=deadline - time.monotonic())


def say_goodbye(exchange: Exchange, rank: int) -> None:
    """Announces that this rank no longer needs the exchange."""
    with suppress(ExchangeError):
        exchange.set(f"left/{rank}", b"")


@marked(Mark.STORE)
def wait_for_others(exchange: Exchange, rank: int, world_size: int) -> None:
    """Waits, at most 3 s, until the other ranks no longer need the store."""
    others = [f"left/{other}" for other in range(world_size) if other != rank]
    with suppress(ExchangeError):
        # They are on their way.
        poll_s = poll_interval_s(world_size)
        wait_for_keys(exchange, others, deadline_s=_OTHERS_LEAVE_S, poll_s=poll_s / 10, longest_poll_s=poll_s)
