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
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, _utils, dataloader
from torch.utils.data._utils import signal_handling

# Waiting workers end at once with SIGTERM, unless they have a handler that waits as well.
_TERMINATES_S = 0.5
# How often a wait for a batch checks whether workers have ended (torch: every 5 s).
_LOOK_S = 0.5
_CUT_POLL_S = 0.05
# The exit code that Python's forkserver reports for a process that other code has reaped.
_UNKNOWN_EXIT_CODE = 255


def around_worker_handlers(before: Callable[[], object], after: Callable[[], object]) -> None:
    """In a child that may become a loader's worker: calls functions around the setting of its signal handlers.

    Args:
        before: Called before torch sets its handlers of SIGSEGV, SIGBUS and SIGFPE.
        after: Called after that.
    """
    handling: Any = signal_handling
    original, pid = handling._set_worker_signal_handlers, os.getpid()

    def set_handlers() -> None:
        # A child of this one has its own files.
        if os.getpid() != pid:
            original()
            return
        before()
        original()
        after()

    handling._set_worker_signal_handlers = set_handlers


def sent_instead_of_batch(sent: object) -> tuple[str, str] | None:
    """The error that a loader's worker sends in place of a batch: its class's name, and its traceback as printed.

    Args:
        sent: What the worker puts into its queue.
    """
    parts = sent if isinstance(sent, tuple) else ()
    errors = (part for part in parts if isinstance(part, ExceptionWrapper))
    return next(((str(one.exc_type.__name__), str(one.exc_msg)) for one in errors), None)


class WorkersSilent(Exception):
    """Workers did not return a batch in time."""


class WorkersEnded(RuntimeError):
    """Worker processes of a loader ended while batches were still due from them."""


class _Ends:
    """Detects which worker processes have ended, even if other code has reaped them. Used by one thread.

    ``Process.is_alive()`` cannot: a process that other code has waited for stays alive to it forever.

    Attributes:
        ended: The ones that have ended, in words.
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
        """Waits for the next one to end, and returns whether any still runs."""
        for fd, _ in self._poll.poll(max(0.0, within_s) * 1000):
            self._poll.unregister(fd)
            self.ended.append(self._settled(self._running.pop(fd)))
        return bool(self._running)

    def or_readable(self, fd: int) -> Callable[[float | None], tuple[bool, bool]]:
        """A function, for one thread, that waits for a worker to end, or for the file descriptor.

        Its argument is the longest wait in seconds; it returns whether there is something to read, and whether a worker
        has ended.
        """
        poll = _poll_of([fd, *self._fds])

        def wait(within_s: float | None) -> tuple[bool, bool]:
            found = {each for each, _ in poll.poll(None if within_s is None else max(0.0, within_s) * 1000)}
            return fd in found, bool(found - {fd})

        return wait

    def _settled(self, process: Any) -> str:
        code = process.exitcode
        if code is None:
            # Otherwise multiprocessing would signal whichever process gets that pid next.
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
        """Sends a signal to the running ones."""
        for fd, process in self._running.items():
            with suppress(ProcessLookupError):
                if fd in self._pidfds:
                    signal.pidfd_send_signal(fd, number)
                elif process.is_alive():
                    os.kill(process.pid, number)

    def close(self) -> None:
        """Stops watching them."""
        for pidfd in self._pidfds:
            if pidfd is not None:
                os.close(pidfd)


def _poll_of(fds: Iterable[int]) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def _pidfd(process: Any) -> int | None:
    """None if there is none, as on macOS, or the process has been reaped already: then its sentinel is ready."""
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None


def _give_up_cut_messages(connection: Any, ends: _Ends) -> None:
    """Makes reading from a pipe raise ``queue.Empty`` if the process that was writing to it is dead.

    A killed worker leaves a truncated message, and its lock on the pipe locked: nothing follows, and there is no end of
    file as this process has the pipe's other end open as well.
    """
    reader = connection.fileno()
    # Nobody else reads from it. Most messages have arrived whole, and reading them takes no poll.
    os.set_blocking(reader, False)
    wait = ends.or_readable(reader)
    is_cut = False

    def receive(size: int, read: Any = None) -> io.BytesIO:
        nonlocal is_cut
        received = io.BytesIO()
        while (missing := size - received.tell()) > 0:
            if is_cut:
                time.sleep(_CUT_POLL_S)  # torch's pin-memory thread retries
                raise queue.Empty
            try:
                piece = os.read(reader, missing)
            except BlockingIOError:
                is_readable, _ = wait(None)
                is_cut = not is_readable
                continue
            if not piece:
                raise EOFError
            received.write(piece)
        return received

    connection._recv = receive


class _Workers(dataloader._MultiProcessingDataLoaderIter):
    """The worker processes of a loader, as torch's own iterator; a partly constructed one can be shut down, too.

    A worker may end at any instant. Torch then raises from a signal handler on the main thread, in the middle of a
    training step for example; if other code has reaped the process, torch waits forever instead. This class raises only
    in ``next()``, and takes no lock that a killed worker may hold.
    """

    made_by = -1
    silent_from: float | None = None
    answers_s = 0.0
    ends: _Ends | None = None
    ended = ""
    is_asked_to_end = False
    _wait: Callable[[float | None], tuple[bool, bool]] | None = None

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
            self.ends = _Ends(self._workers)
            pipe = self._worker_result_queue._reader  # type: ignore[attr-defined]
            _give_up_cut_messages(pipe, self.ends)
            if not self._pin_memory:  # otherwise a thread of torch reads it
                self._wait = self.ends.or_readable(pipe.fileno())
        super()._reset(loader, first_iter)

    def _next_data(self) -> Any:
        if self.ended:  # torch would skip the batches of the dead worker
            raise WorkersEnded(self.ended)
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _try_get_data(self, timeout: float | None = None) -> Any:
        until = time.monotonic() + (_LOOK_S if timeout is None else timeout)
        while True:
            found = self._try_once(until)
            if found[0]:
                return found
            now = time.monotonic()
            if self.silent_from is not None and now >= self.silent_from:
                raise WorkersSilent(f"no batch has arrived for {self.answers_s:.0f} s")
            if now >= until:
                return found

    def _try_once(self, until: float) -> Any:
        now = time.monotonic()
        waits_s = min(_LOOK_S, max(0.0, until - now))
        if self.silent_from is not None:
            waits_s = min(waits_s, max(0.0, self.silent_from - now))
        may_have_ended = True
        if self._wait is not None:
            _, may_have_ended = self._wait(waits_s)
            waits_s = 0.0
        try:
            found = super()._try_get_data(waits_s)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._raise_if_ended(error)
            raise
        if may_have_ended:
            self._raise_if_ended(None)
        return found

    def _raise_if_ended(self, error: Exception | None) -> None:
        if self.ends is not None:
            # Its connections break shortly before the process ends.
            self.ends.look(0.0 if error is None else _LOOK_S)
            if self.ends.ended:
                self.ended = " ".join(self.ends.ended)
                raise WorkersEnded(self.ended) from error

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        # Torch's method also checks the event of finished workers, and waits for its lock.
        self._index_queues[worker_id].put(None)
        self._workers_status[worker_id] = False

    def _get_data(self) -> Any:
        try:
            return super()._get_data()  # type: ignore[no-untyped-call]
        except WorkersEnded:
            raise
        except RuntimeError as error:
            # Torch's pin-memory thread ends with messages that cannot be received from a dead worker.
            self._raise_if_ended(error)
            raise

    def _shutdown_workers(self, *, at_once: bool = False) -> None:
        # Not suppress(): this may run at interpreter shutdown, after the module's names are gone.
        try:
            # A forked process would wait for workers that are not its children.
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
        # A worker killed while sending leaves the pipe locked forever; the thread checks every 5 s by itself.
        if pipe._wlock.acquire(timeout=1):  # type: ignore[attr-defined]
            pipe._wlock.release()  # type: ignore[attr-defined]
            pipe.put((None, None))
        thread.join(_utils.MP_STATUS_CHECK_INTERVAL + 1)
        pipe.cancel_join_thread()
        pipe.close()

    def ask_to_end(self) -> None:
        """Tells the workers to end, without waiting for them; shutting down waits."""
        # A pin-memory thread would read truncated messages of dead workers.
        is_pinned = getattr(self, "_pin_memory_thread", None) is not None
        if self._shutdown or is_pinned or self.ends is None or not self.ends.look() or self.ends.ended:
            return
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        if self.is_asked_to_end:
            return
        self.is_asked_to_end = True
        # Event.set() takes a lock that a killed worker may hold; nothing waits for this event.
        self._workers_done_event._flag.release()  # type: ignore[attr-defined]
        for index_queue in self._index_queues:
            index_queue.put(None)

    def _await_end(self, ends: _Ends, within_s: float) -> None:
        until = time.monotonic() + within_s
        while ends.look(until - time.monotonic()) and time.monotonic() < until:
            if any(process.exitcode for process in self._workers):
                # The others may wait for a lock that the dead one holds.
                until = min(until, time.monotonic() + _TERMINATES_S)


# Profilers show this name.
_Workers.__name__ = dataloader._MultiProcessingDataLoaderIter.__name__


def begin_loading(loader: Any) -> Any:
    """Begins an epoch of a loader as ``DataLoader.__iter__`` does, but always notices a worker that ends.

    Within half a second, even if other code has reaped it, ``next()`` raises :class:`WorkersEnded` on the calling
    thread; torch would raise on the main thread, wherever that is.
    """
    if loader.num_workers == 0:
        return dataloader._SingleProcessDataLoaderIter(loader)
    # In two steps: if not all of it starts, the rest has to be ended.
    iterator = _Workers.__new__(_Workers)
    iterator.made_by = os.getpid()
    try:
        iterator.__init__(loader)  # type: ignore[misc]
    except BaseException:
        iterator._shutdown_workers()
        raise
    return iterator


@contextmanager
def answered_within(iterator: Any, within_s: float) -> Iterator[None]:
    """Makes ``next()`` raise if the worker processes of a loader's iterator do not answer.

    Args:
        iterator: The iterator; one without workers always answers.
        within_s: How long they may take, seconds.
    """
    if not isinstance(iterator, _Workers):
        yield
        return
    iterator.answers_s, iterator.silent_from = within_s, time.monotonic() + within_s
    try:
        yield
    finally:
        iterator.silent_from = None


def ask_to_end_loading(iterator: Any) -> None:
    """Asks the worker processes of an iterator that is not used any more to end; :func:`end_loading` waits for them."""
    if isinstance(iterator, _Workers):
        iterator.ask_to_end()


def end_loading(iterator: Any, *, at_once: bool = False) -> None:
    """Ends the worker processes of a loader's iterator, if it has any, and waits for them.

    Args:
        at_once: Whether not to ask them first: asking waits 5 s for workers that do not answer.
    """
    if isinstance(iterator, _Workers):
        iterator._shutdown_workers(at_once=at_once)


def worker_pids(iterator: Any) -> tuple[int, ...]:
    """The process ids of an iterator's workers."""
    return tuple(process.pid for process in getattr(iterator, "_workers", ()))


def ask_for_batch(iterator: Any) -> None:
    """Asks an iterator's workers for one more batch than torch does, the next of its sampler."""
    iterator._try_put_index()


def pending_batches(iterator: Any) -> Any:
    """The numbers of the batches that were requested from an iterator's workers and not handed out."""
    return iterator._task_info.keys()


def draw_base_seed(loader: Any) -> int:
    """Draws the base seed of an iterator of a loader, from the generator that torch uses."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


def base_seed_of(iterator: Any) -> int:
    """The base seed that torch drew for an iterator."""
    return int(iterator._base_seed)


def generator_from(seed: int) -> torch.Generator:
    """A separate generator."""
    return torch.Generator().manual_seed(seed)


def is_seeded() -> bool:
    """Whether PyTorch's global generator was seeded; otherwise its seed has 64 random bits.

    A seed of more than 32 bits, such as a clock's, is taken for an unseeded one.
    """
    # PyTorch adds 2**64 to negative ones.
    return not 1 << 32 <= torch.initial_seed() < (1 << 64) - (1 << 32)


def is_dataloader(loader: Any) -> bool:
    """Whether it is a ``DataLoader``."""
    return isinstance(loader, dataloader.DataLoader)


def has_iterable_dataset(loader: Any) -> bool:
    """Whether a ``DataLoader`` has no sampler: its dataset alone determines what comes next."""
    return isinstance(loader.dataset, IterableDataset)


def iterates_its_own_way(loader: Any) -> list[Any]:
    """The methods of iteration that a subclass of ``DataLoader`` overrides."""
    kinds = type(loader).__mro__[: type(loader).__mro__.index(dataloader.DataLoader)]
    return [vars(kind)[name] for kind in kinds for name in ("__iter__", "_get_iterator") if name in vars(kind)]
