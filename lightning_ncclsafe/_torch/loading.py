"""A DataLoader's worker processes, whose end is always noticed."""

import io
import os
import queue
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import IterableDataset, _utils, dataloader
from torch.utils.data._utils import signal_handling

# Workers that wait for something end at once with SIGTERM, unless a handler of their own waits as well.
_TERMINATES_S = 0.5
# How often somebody who waits for a batch looks whether workers have ended (torch: every 5 s).
_LOOK_S = 0.5
_CUT_POLL_S = 0.05
# What Python's own forkserver says of a process that somebody else has reaped.
_UNKNOWN_EXIT_CODE = 255


class WorkersSilent(Exception):
    """Workers have not given a batch in time."""


class WorkersEnded(RuntimeError):
    """Worker processes of a loader have ended while batches were still due from them."""


class _Ends:
    """Knows which worker processes have ended, whoever has reaped them. Used by one thread.

    ``Process.is_alive()`` does not know: a process that somebody else has waited for is alive to it for ever.

    Attributes:
        ended: Those that have ended, in words.
    """

    def __init__(self, processes: Sequence[Any]) -> None:
        self.ended: list[str] = []
        self._count = len(processes)
        self._pidfds = [_pidfd(process) for process in processes]
        known = zip(processes, self._pidfds, strict=True)
        self._running = {process.sentinel if pidfd is None else pidfd: process for process, pidfd in known}
        self._fds = [*self._running]  # each becomes readable when its process ends
        self._poll = _poll_of(self._fds)

    def look(self, within_s: float = 0.0) -> bool:
        """Waits for the next one to end, and returns whether any of them runs on."""
        for fd, _ in self._poll.poll(max(0.0, within_s) * 1000):
            self._poll.unregister(fd)
            self.ended.append(self._settled(self._running.pop(fd)))
        return bool(self._running)

    def or_readable(self, fd: int) -> Callable[[float | None], bool]:
        """A function, for one thread, that waits for one to end, or for the file descriptor.

        It takes the most seconds to wait, and returns whether there is something to read.
        """
        poll = _poll_of([fd, *self._fds])

        def wait(within_s: float | None) -> bool:
            found = poll.poll(None if within_s is None else max(0.0, within_s) * 1000)
            return any(each == fd for each, _ in found)

        return wait

    def _settled(self, process: Any) -> str:
        code = process.exitcode
        if code is None:
            # Else multiprocessing would send its signals to whichever process has that number next.
            process._popen.returncode = _UNKNOWN_EXIT_CODE
        who = f"DataLoader worker (pid {process.pid})"
        if code is None:
            how = "exited unexpectedly. Its exit status is unknown, because something else in this process reaped it"
        elif code < 0:
            how = f"is killed by signal: {signal.strsignal(-code) or -code}"
        else:
            how = f"exited unexpectedly with exit code {code}"
        shm = " It is possible that its shared memory (/dev/shm) is full." if code == -signal.SIGBUS else ""
        return f"{who} {how}. It was one of {self._count} workers.{shm}"

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to those that run."""
        for fd, process in self._running.items():
            with suppress(ProcessLookupError):
                if fd in self._pidfds:
                    signal.pidfd_send_signal(fd, number)
                elif process.is_alive():
                    os.kill(process.pid, number)

    def close(self) -> None:
        """They are not looked after any more."""
        for pidfd in self._pidfds:
            if pidfd is not None:
                os.close(pidfd)


def _poll_of(fds: Iterable[int]) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def _pidfd(process: Any) -> int | None:
    """None where there is none, as on macOS, and of a process that has been reaped already: its sentinel tells."""
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None


def _give_up_cut_messages(connection: Any, ends: _Ends) -> None:
    """Has reading from a pipe end with ``queue.Empty`` where the process is dead that was writing to it.

    A worker that is killed leaves what it was sending cut off, and its lock on the pipe locked: nothing follows, and
    there is no end of file while this process has the pipe's other end open as well.
    """
    reader = connection.fileno()
    is_readable = ends.or_readable(reader)
    is_cut = False

    def receive(size: int, read: Any = None) -> io.BytesIO:
        nonlocal is_cut
        received = io.BytesIO()
        while (missing := size - received.tell()) > 0:
            is_cut = is_cut or not is_readable(None)
            if is_cut:
                time.sleep(_CUT_POLL_S)  # torch's thread that pins memory asks again and again
                raise queue.Empty
            piece = os.read(reader, missing)
            if not piece:
                raise EOFError
            received.write(piece)
        return received

    connection._recv = receive


class _Workers(dataloader._MultiProcessingDataLoaderIter):
    """The worker processes of a loader, as torch's own iterator; one that was not fully made can be shut down too.

    A worker may end at any instant. Torch has the main thread raise from a signal handler then, in the midst of a
    training step for example; where that does not come about, as somebody else has reaped the process, it waits for
    ever. This one raises in ``next()`` and nowhere else, and takes no lock that a killed worker may hold.
    """

    made_by = -1
    silent_from: float | None = None
    answers_s = 0.0
    ends: _Ends | None = None
    ended = ""
    is_asked_to_end = False
    _wait: Callable[[float | None], bool] | None = None

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
            self.ends = _Ends(self._workers)
            pipe = self._worker_result_queue._reader  # type: ignore[attr-defined]
            _give_up_cut_messages(pipe, self.ends)
            if not self._pin_memory:  # else it is read by a thread of torch's
                self._wait = self.ends.or_readable(pipe.fileno())
        super()._reset(loader, first_iter)

    def _next_data(self) -> Any:
        if self.ended:  # torch would leave out what the dead worker has not made
            raise WorkersEnded(self.ended)
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _try_get_data(self, timeout: float | None = None) -> Any:
        until = time.monotonic() + (_LOOK_S if timeout is None else timeout)
        while True:
            now = time.monotonic()
            waits_s = min(_LOOK_S, max(0.0, until - now))
            if self.silent_from is not None:
                waits_s = min(waits_s, max(0.0, self.silent_from - now))
            if self._wait is not None:
                self._wait(waits_s)
                waits_s = 0.0
            try:
                found = super()._try_get_data(waits_s)  # type: ignore[no-untyped-call]
            except Exception as error:
                self._raise_if_ended(error)
                raise
            self._raise_if_ended(None)
            if found[0]:
                return found
            now = time.monotonic()
            if self.silent_from is not None and now >= self.silent_from:
                raise WorkersSilent(f"no batch has arrived for {self.answers_s:.0f} s")
            if now >= until:
                return found

    def _raise_if_ended(self, error: Exception | None) -> None:
        if self.ends is not None:
            # Its connections break a moment before the process has ended.
            self.ends.look(0.0 if error is None else _LOOK_S)
            if self.ends.ended:
                self.ended = " ".join(self.ends.ended)
                raise WorkersEnded(self.ended) from error

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        # Torch's asks the event, too, whether the workers are done, and waits for the event's lock.
        self._index_queues[worker_id].put(None)
        self._workers_status[worker_id] = False

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except WorkersEnded:
            raise
        except RuntimeError as error:
            # Torch's thread that pins memory ends with what cannot be received from a dead worker.
            self._raise_if_ended(error)
            raise

    def _shutdown_workers(self, *, at_once: bool = False) -> None:
        # Not suppress(): this may run when the interpreter has taken the module's names away.
        try:
            # In a process that was forked meanwhile it would wait for workers that are not its own.
            if self.made_by != os.getpid() or self._shutdown or _utils.python_exit_status in (True, None):
                return
        except AttributeError:
            return
        self._shutdown = True
        ends = self.ends or _Ends(self._workers)
        is_clean = self.is_asked_to_end or (not at_once and ends.look() and not ends.ended)
        if not is_clean:
            self._kill(ends)
        self._end_pinning()
        if is_clean:
            self._ask_to_end()
            self._await_end(ends, _utils.MP_STATUS_CHECK_INTERVAL)
            self._kill(ends)
        for process in self._workers:
            process.join(0)
        for index_queue in self._index_queues:
            index_queue.cancel_join_thread()
            index_queue.close()
        ends.close()

    def _kill(self, ends: _Ends) -> None:
        for number, within_s in ((signal.SIGTERM, _TERMINATES_S), (signal.SIGKILL, _utils.MP_STATUS_CHECK_INTERVAL)):
            if ends.look():
                ends.send(number)
                self._await_end(ends, within_s)

    def _end_pinning(self) -> None:
        thread = getattr(self, "_pin_memory_thread", None)
        if thread is None:
            return
        self._pin_memory_thread_done_event.set()
        pipe = self._worker_result_queue
        # One that was killed while it was sending has locked the pipe for good; the thread looks every 5 s by itself.
        if pipe._wlock.acquire(timeout=1):  # type: ignore[attr-defined]
            pipe._wlock.release()  # type: ignore[attr-defined]
            pipe.put((None, None))
        thread.join(_utils.MP_STATUS_CHECK_INTERVAL + 1)
        pipe.cancel_join_thread()
        pipe.close()

    def ask_to_end(self) -> None:
        """Has the workers end while this process does something else; they are waited for where they are shut down."""
        # A thread that pins memory would read what they were sending from workers that are gone.
        is_pinned = getattr(self, "_pin_memory_thread", None) is not None
        if self._shutdown or is_pinned or self.ends is None or not self.ends.look() or self.ends.ended:
            return
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        if self.is_asked_to_end:
            return
        self.is_asked_to_end = True
        # Event.set() takes a lock that a worker may hold when it is killed; nobody waits for this event.
        self._workers_done_event._flag.release()  # type: ignore[attr-defined]
        for index_queue in self._index_queues:
            index_queue.put(None)

    def _await_end(self, ends: _Ends, within_s: float) -> None:
        until = time.monotonic() + within_s
        while ends.look(until - time.monotonic()) and time.monotonic() < until:
            if any(process.exitcode for process in self._workers):
                until = min(until, time.monotonic() + _TERMINATES_S)  # the others may wait for a lock of the dead one


# Profilers show it.
_Workers.__name__ = dataloader._MultiProcessingDataLoaderIter.__name__


def begin_loading(loader: Any) -> Any:
    """Begins an epoch of a loader as ``DataLoader.__iter__`` does, but that a worker that ends is always noticed.

    Within half a second then, whoever has reaped it, ``next()`` raises :class:`WorkersEnded` on the thread that called
    it; torch has the main thread raise wherever that is.

    Args:
        loader: The ``DataLoader``.
    """
    if loader.num_workers == 0:
        return dataloader._SingleProcessDataLoaderIter(loader)
    # In two steps: what was started of it has to be ended, should not all of it start.
    iterator = _Workers.__new__(_Workers)
    iterator.made_by = os.getpid()
    try:
        iterator.__init__(loader)  # type: ignore[misc]
    except BaseException:
        iterator._shutdown_workers()
        raise
    return iterator


@contextmanager
def answered_within(iterator: Any, within_s: float | None) -> Iterator[None]:
    """Has ``next()`` raise where the worker processes of a loader's iterator do not answer.

    Args:
        iterator: It; one without workers always answers.
        within_s: How long they may take, seconds; None for as long as it takes.

    Raises:
        WorkersSilent: They have not answered.
    """
    if within_s is None or not isinstance(iterator, _Workers):
        yield
        return
    iterator.answers_s, iterator.silent_from = within_s, time.monotonic() + within_s
    try:
        yield
    finally:
        iterator.silent_from = None


def ask_to_end_loading(iterator: Any) -> None:
    """Has the worker processes of a loader's iterator end, if it has any, and does not wait: :func:`end_loading` does.

    Args:
        iterator: It; it gives no batches any more.
    """
    if isinstance(iterator, _Workers):
        iterator.ask_to_end()


def end_loading(iterator: Any, *, at_once: bool = False) -> None:
    """Ends the worker processes of a loader's iterator, if it has any, and waits for them.

    Args:
        iterator: It.
        at_once: Whether they are not asked, as they would not answer: that is waited for, for 5 s.
    """
    if isinstance(iterator, _Workers):
        iterator._shutdown_workers(at_once=at_once)


def worker_pids(iterator: Any) -> tuple[int, ...]:
    """The process ids of an iterator's workers."""
    return tuple(process.pid for process in getattr(iterator, "_workers", ()))


def ask_for_batch(iterator: Any) -> None:
    """Asks an iterator's workers for a batch more, beyond those that torch asks for; its sampler says which."""
    iterator._try_put_index()


def pending_batches(iterator: Any) -> Any:
    """The numbers of the batches that an iterator has asked its workers for and has not handed out."""
    return iterator._task_info.keys()


def draw_base_seed(loader: Any) -> int:
    """Draws the number that torch draws for each iterator of a loader, from where torch draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


def base_seed_of(iterator: Any) -> int:
    """The number that torch has drawn for an iterator."""
    return int(iterator._base_seed)


def generator_from(seed: int) -> torch.Generator:
    """A generator that nobody else draws from."""
    return torch.Generator().manual_seed(seed)


def is_seeded() -> bool:
    """Whether somebody has seeded PyTorch's global generator; without, its seed has 64 random bits.

    A seed of more than 32 bits, such as a clock's, looks like none.
    """
    # PyTorch adds 2**64 to negative ones.
    return not 1 << 32 <= torch.initial_seed() < (1 << 64) - (1 << 32)


def is_dataloader(loader: Any) -> bool:
    """Whether it is a ``DataLoader``."""
    return isinstance(loader, dataloader.DataLoader)


def has_iterable_dataset(loader: Any) -> bool:
    """Whether a ``DataLoader`` has no sampler: its dataset alone knows what comes next."""
    return isinstance(loader.dataset, IterableDataset)


def iterates_its_own_way(loader: Any) -> list[Any]:
    """The methods with which a subclass of ``DataLoader`` has replaced how it is iterated."""
    kinds = type(loader).__mro__[: type(loader).__mro__.index(dataloader.DataLoader)]
    return [vars(kind)[name] for kind in kinds for name in ("__iter__", "_get_iterator") if name in vars(kind)]
