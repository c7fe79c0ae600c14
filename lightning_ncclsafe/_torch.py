"""The only file that calls private functions of torch; what differs between its versions is decided here."""

import copy
import ctypes
import gc
import importlib
import io
import json
import os
import pickle
import queue
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, _utils, dataloader
from torch.utils.data._utils import signal_handling

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.recorder.model import MOST_ENTRIES

# torch._C._distributed_c10d is absent from builds without distributed support.
try:
    from torch._C import _distributed_c10d as _c10d
except ImportError:  # pragma: no cover - needs such a build
    _c10d = None  # type: ignore[assignment]

# NCCL keeps a recorder of its own, absent from CPU builds; every other back end (and, in newer releases, "nccl2")
# writes to the general one. Both are asked, so that a job with gloo and NCCL groups is seen whole.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# Whose collectives each of them is known to keep.
_RECORDER_OF = {"nccl": _RECORDERS[0], "gloo": _RECORDERS[1]}
# CU_STREAM_CAPTURE_MODE_RELAXED of CUDA's driver.
_CAPTURE_MODE_RELAXED = 2
GLOO_TIMEOUT_CHANGES = torch.__version__ >= "2.13"
"""Whether gloo's groups keep to a timeout that is set later: not in torch 2.8 (pytorch#165422), and in 2.13 they do."""

# Workers that wait for something end at once with SIGTERM, unless a handler of their own waits as well.
_TERMINATES_S = 0.5
# How often somebody who waits for a batch looks whether workers have ended (torch: every 5 s).
_LOOK_S = 0.5
_CUT_POLL_S = 0.05
# What Python's own forkserver says of a process that somebody else has reaped.
_UNKNOWN_EXIT_CODE = 255


class OwnGroup(NamedTuple):
    """A process group of this process: its unique name, its description and the global ranks of its members."""

    name: str
    description: str
    ranks: tuple[int, ...]


def recorder_dumps(*, collectives: bool) -> Iterator[dict[str, Any]]:
    """What each Flight Recorder of this process holds, as PyTorch's own JSON.

    Args:
        collectives: Whether to include the entries; without them only the position of each group is dumped, which
            takes about 0.05 ms. Of a recorder of more than ``MOST_ENTRIES`` only the newest are included, and of
            NCCL's only those that are outstanding.
    """
    is_large = collectives and recorder_size(DEFAULT_RECORDER_SIZE) > MOST_ENTRIES
    for name in _RECORDERS:
        dump: Callable[[bool, bool], bytes] | None = getattr(_c10d, name, None)
        if dump is not None:
            with _captures_undisturbed() if collectives else nullcontext():
                data = dump(collectives, is_large)
            found = json.loads(data)
            if is_large and "entries" in found:
                found["entries"] = found["entries"][-MOST_ENTRIES:]
            yield found


@contextmanager
def _captures_undisturbed() -> Iterator[None]:
    """For reading entries of NCCL's recorder while another thread may capture a CUDA graph.

    The recorder asks CUDA about the events of its entries. While a stream is captured in the default mode, such a call
    of any thread makes the capture invalid, unless the thread has said that it has nothing to do with it. PyTorch's
    watchdog says so, too (``CUDAStreamCaptureModeGuard``).
    """
    # Without CUDA there is no capture, and no driver to load for this alone; ROCm goes by its name, with another.
    if torch.version.cuda is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    is_said = exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if is_said:
            # What the thread had said before.
            exchange(ctypes.byref(mode))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class GroupCalls(NamedTuple):
    """What a process group says of itself, whether or not there is a recorder.

    Attributes:
        name: Its unique name.
        backends: Names of its back ends: ``("gloo",)``.
        called: How many collectives this process has called in it; None where its back end does not count them.
    """

    name: str
    backends: tuple[str, ...]
    called: int | None


def group_calls() -> list[GroupCalls]:
    """What the groups of this process count themselves, which no setting turns off. Takes some microseconds."""
    return [GroupCalls(group.group_name, _backends(group), _count(group)) for group in _groups_here()]


def _backends(group: Any) -> tuple[str, ...]:
    try:
        config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    except (KeyError, ValueError):  # it has just been destroyed
        return ()
    return tuple(dict.fromkeys(part.rpartition(":")[2] for part in config.split(",")))


def _count(group: Any) -> int | None:
    with suppress(RuntimeError):  # its back end does not count
        return int(group._get_sequence_number_for_group())
    return None


def counts() -> tuple[int | None, ...]:
    """How many collectives this process has called in each of its groups; takes less than a microsecond a group."""
    return tuple(map(_count, _groups_here()))


def calls_besides(descriptions: Collection[str]) -> int:
    """How many collectives this process has called in its groups, those of these descriptions aside."""
    groups = (group for group in _groups_here() if group.group_desc not in descriptions)
    return sum(count for count in map(_count, groups) if count is not None)


def recorder_is_known(backend: str) -> bool:
    """Whether it is known which of PyTorch's recorders keeps a back end's collectives."""
    return backend in _RECORDER_OF


def recorder_can_be_read(backend: str) -> bool:
    """Whether this build of torch can dump the recorder of a back end that is known."""
    return hasattr(_c10d, _RECORDER_OF[backend])


def groups_made() -> int:
    """How many process groups this process has taken part in making, as a member or not; -1 before the first one."""
    return dist.distributed_c10d.get_pg_count() if distributed_is_initialized() else -1


def process_groups() -> list[OwnGroup]:
    """The process groups that this process is a member of."""
    if not distributed_is_initialized():
        return []
    # A copy first: user code may create groups while another thread reads. Where this process is not a member, torch
    # keeps a number in the group's place.
    members: list[tuple[Any, dict[int, int]]] = [*dist.distributed_c10d._world.pg_group_ranks.items()]
    return [
        OwnGroup(group.group_name, group.group_desc, tuple(sorted(ranks)))
        for group, ranks in members
        if isinstance(group, dist.ProcessGroup)
    ]


def distributed_is_initialized() -> bool:
    """Whether this build has ``torch.distributed`` and the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def own_store_connection(prefix: str) -> Any:
    """A connection of our own to the job's store, under a prefix.

    The default group's store object must not be shared: its socket is locked while the main thread waits in it.

    Returns:
        A ``torch.distributed.Store``.

    Raises:
        RuntimeError: If the store cannot be cloned (a user's own store type) or its host cannot be reached.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(prefix, default.clone())


@marked(Mark.STORE)
def agents_store() -> Any:
    """A connection of our own to the store that torchrun's agent keeps, from before there is a process group.

    Raises:
        RuntimeError: If it cannot be reached.
    """
    timeout = timedelta(seconds=30)
    return _c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout)


def with_prefix(prefix: str, store: Any) -> Any:
    """The part of a store whose keys begin with a prefix."""
    return dist.distributed_c10d.PrefixStore(prefix, store.clone())


# Set by NCCL's watchdogs at an error, for the monitors of all ranks: they dump, wait eight minutes and abort. In this
# order: torch 2.4 and later, older releases.
_SIGNALS = ("exception_dump", "timeout_dump")


def forget_last_start(store: Any) -> None:
    """Deletes what an earlier start has left on the store of torchrun's agent.

    Ranks of this start would take the addresses in there for those of one another (pytorch/pytorch#135712), and the
    monitor of NCCL's watchdogs would take an error of the last start for one of this, and abort a healthy run.

    Args:
        store: A connection to it; no rank of this start may have made its process group yet.
    """
    if dist.is_initialized():
        return
    for error_signal in _SIGNALS:
        store.delete_key(error_signal)
    if hasattr(store, "list_keys"):
        for key in store.list_keys():
            # Of its groups, and of what shares its store, as our own connections do.
            if key.startswith("default_pg/"):
                store.delete_key(key)


@marked(Mark.STORE)
def launched_store(host: str, port: int, rank: int, *, timeout_s: float = 30.0) -> Any:
    """The store of a job that has no process group, found by what its launcher has put into the environment.

    Args:
        host: ``MASTER_ADDR``.
        port: ``MASTER_PORT``.
        rank: Global rank; 0 hosts the store, unless torchrun's agent does.
        timeout_s: How long the host is waited for, seconds.

    Returns:
        A ``torch.distributed.Store``.

    Raises:
        RuntimeError: If it cannot be reached.
    """
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    timeout = timedelta(seconds=timeout_s)
    store = _c10d.TCPStore(host, port, None, hosts, timeout, wait_for_workers=False)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.distributed_c10d.PrefixStore(f"ncclsafe/launched/{restart}", store)


def operation_threads() -> int:
    """Threads that one operation on the CPU uses."""
    return torch.get_num_threads()


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception says only that a collective failed, because a peer is gone or late, or by an abort.

    Gloo has no exception type of its own: it raises ``RuntimeError`` with its source path or a socket's error in the
    text.
    """
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _GLOO_MARKS)


_GLOO_MARKS = (
    "gloo/",
    "Connection closed by peer",
    "Application timeout caused pair closure",
    "Connection reset by peer",
    "Broken pipe",
    "Gloo connect",
    "[c10d]",
)


def hosts_store(rank: int) -> bool:
    """Whether the job's store lives in the process of this rank, so that it dies with it.

    torchrun's agent hosts the store itself and says so in the environment; otherwise rank 0 does.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0


@marked(Mark.VOTE)
def wait_for_vote(work: Any, tensor: Any) -> int:
    """Waits for a vote, and gives the flags that any rank has set."""
    work.wait()
    return int(tensor.item())


class VoteGroup:
    """A gloo process group of our own, on which ranks vote without waiting; made by all ranks at the same time.

    Args:
        description: The group's description.
        timeout_s: Seconds after which a vote that not all ranks take part in fails.

        connect_s: Seconds that ranks are given to connect.

    Raises:
        RuntimeError: If they cannot: gloo takes the network interface that the host's name resolves to, or the one
            that ``GLOO_SOCKET_IFNAME`` names.
    """

    def __init__(self, description: str, *, timeout_s: float, connect_s: float) -> None:
        connect = timedelta(seconds=connect_s)
        self._group: Any = dist.new_group(backend="gloo", timeout=connect, group_desc=description)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), self._group)
        self._any = dist.AllreduceOptions()
        self._any.reduceOp = dist.ReduceOp.BOR  # type: ignore[assignment]
        self._works: deque[Any] = deque()

    def start(self, flags: int) -> Callable[[], int]:
        """Starts a vote, and does not wait for it.

        Returns:
            A function that waits for it, and gives the flags that any rank has set.
        """
        # One element: of more, gloo makes several messages, which takes three times the processor time.
        tensor = torch.tensor((flags,), dtype=torch.int64)
        # dist.all_reduce does the same, after 20 µs of checks.
        work = self._group.allreduce([tensor], self._any)
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        self._works.append(work)

        return partial(wait_for_vote, work, tensor)

    def gather(self, *values: int) -> list[list[int]]:
        """The values of every rank, by rank. Waits."""
        mine = torch.tensor(values, dtype=torch.int64)
        everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everybodys, mine, self._group)
        return [tensor.tolist() for tensor in everybodys]

    def close(self) -> None:
        """Gives the group back, unless a vote on it has not ended: waiting for that could take for ever."""
        if all(work.is_completed() for work in self._works):
            with suppress(Exception):
                dist.destroy_process_group(self._group)


def versions() -> dict[str, str]:
    """Versions of torch, CUDA and NCCL as this build knows them."""
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
        with suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


class _PlainUnpickler(pickle.Unpickler):
    """Reads what the recorder dumps: lists, dictionaries, numbers and text. Nothing that is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"The Flight Recorder's dump asks for {module}.{name}; it should be plain data.")


def recorder_entries(*, stacks: bool = False) -> Iterator[list[dict[str, Any]]]:
    """The entries of each Flight Recorder of this process, oldest first.

    As pickle, which takes half the time of JSON: some 7 µs an entry (torch 2.13). The GIL is held meanwhile, so of
    recorders of more than ``MOST_ENTRIES`` nothing is read.

    Args:
        stacks: Whether to include the Python stack of each call, innermost frame first: 5 µs an entry more.
    """
    if recorder_size(DEFAULT_RECORDER_SIZE) > MOST_ENTRIES:
        return
    for name in _RECORDERS:
        dump: Callable[[bool, bool, bool], bytes] | None = getattr(_c10d, name.removesuffix("_json"), None)
        if dump is not None:
            with _captures_undisturbed(), _inductor_not_imported() if stacks else nullcontext():
                data = dump(True, stacks, False)
            yield _load_plain(data).get("entries", [])


class _Unimported(ModuleType):
    """Stands for a module that is not imported just for one of its functions; everything else is the module's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


class _NothingGenerated:
    """Stands for Inductor's cache of generated code, which is empty while Inductor is not imported."""

    def stack_frames_for_code(self, path: str, lineno: int) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._inductor.codecache").PyCodeCache, name)


@contextmanager
def _inductor_not_imported() -> Iterator[None]:
    """For reading stacks: torch asks Inductor what code it has generated (torch 2.13: python_tracer.cpp).

    Importing it for that takes a second and 800 modules, and never ends where the main thread hangs in that import.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if hasattr(codecache, "PyCodeCache") and getattr(vars(torch).get("_inductor"), "codecache", None) is codecache:
        yield
        return
    stand_in, cache = _Unimported("torch._inductor"), _Unimported("torch._inductor.codecache")
    stand_in.codecache, cache.PyCodeCache = cache, _NothingGenerated()  # type: ignore[attr-defined]
    before = vars(torch).get("_inductor")
    vars(torch)["_inductor"] = stand_in
    try:
        yield
    finally:
        # Unless it has been imported meanwhile.
        if vars(torch)["_inductor"] is stand_in:
            del vars(torch)["_inductor"]
            if before is not None:
                vars(torch)["_inductor"] = before


def _load_plain(data: bytes) -> Any:
    """Ten objects an entry would set off Python's garbage collector, also for all that the training has: 0.2 s once."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    finally:
        if was_on:
            gc.enable()


DEFAULT_RECORDER_SIZE = 2000
"""Entries that a Flight Recorder keeps by default from torch 2.11 on. Before that it is off by default."""

# The second is the older name.
_RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def recorder_size(default: int) -> int:
    """How many entries the Flight Recorder keeps by the user's word, in the environment; 0 where it is off."""
    for name in _RECORDER_SIZES:
        with suppress(KeyError, ValueError):
            return max(int(os.environ[name]), 0)
    return default


@contextmanager
def recorder_of_size(default: int) -> Iterator[None]:
    """What is made meanwhile finds this size of the recorder in the environment, unless the user has said how many.

    Both the recorders and NCCL's process groups look there.
    """
    if any(name in os.environ for name in _RECORDER_SIZES):
        yield
        return
    os.environ[_RECORDER_SIZES[0]] = str(default)
    try:
        yield
    finally:
        os.environ.pop(_RECORDER_SIZES[0], None)


def make_recorders(default: int) -> None:
    """Makes the Flight Recorders of this process, where there are none yet, unless the user has said how many entries.

    A recorder is made at its first use and keeps the size that the environment says then, off or on: asking it for a
    dump is a use, and so is a process group's first collective.
    """
    with recorder_of_size(default):
        for _ in recorder_dumps(collectives=False):
            pass


def time_collectives_on_device() -> int:
    """Makes NCCL's back ends of this process record how long each collective takes on the device.

    As ``TORCH_NCCL_ENABLE_TIMING=1`` does, but for groups that exist already. It adds two CUDA events to a collective
    and no synchronisation.

    Returns:
        The number of back ends that now do.

    Raises:
        AttributeError: If this torch cannot.
    """
    count = 0
    for group in _groups_here():
        backend = _backend_of(group, "cuda")
        if backend is not None and "nccl" in backend.name().lower():
            # Bound on the group only, which passes it on to its back ends.
            group._enable_collectives_timing()
            count += 1
    return count


def _groups_here() -> list[Any]:
    if not distributed_is_initialized():
        return []
    return [*dist.distributed_c10d._world.pg_map]


def _backend_of(group: Any, device: str) -> Any:
    with suppress(RuntimeError):  # the group has none for this type of device
        return group._get_backend(torch.device(device))
    return None


class TimedGroup(NamedTuple):
    """A process group whose back end has a timeout that can be set.

    Attributes:
        name: The group's unique name.
        description: Its description.
        timeout_s: Seconds; the longest, where it has several back ends.
        group: The group itself.
    """

    name: str
    description: str
    timeout_s: float
    group: Any

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the timeout of collectives that are called from now on."""
        timeout = timedelta(seconds=timeout_s)
        # Public from torch 2.14 on.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timeout, self.group)


def timed_groups() -> list[TimedGroup]:
    """The process groups that this process is a member of; without those whose back end has no timeout to set."""
    timeouts = [(group, _timeout_s(group)) for group in _groups_here()]
    return [
        TimedGroup(group.group_name, group.group_desc, timeout_s, group)
        for group, timeout_s in timeouts
        if timeout_s is not None
    ]


def _timeout_s(group: Any) -> float | None:
    """Only gloo and NCCL have a timeout that can be set; ``_set_pg_timeout`` warns about the others."""
    backends = [group._get_backend(device) for device in group._device_types]
    known = [backend for backend in backends if type(backend).__name__ in ("ProcessGroupGloo", "ProcessGroupNCCL")]
    return max((backend.options._timeout.total_seconds() for backend in known), default=None)


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
            how = "exited unexpectedly. Its exit status is unknown, as something else in this process has reaped it"
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
                raise WorkersSilent(f"no batch has come for {self.answers_s:.0f} s")
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
    """Whether somebody has seeded PyTorch's global generator; without, its seed has 64 random bits."""
    return torch.initial_seed() < 1 << 32


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


class SentTogether(NamedTuple):
    """Parameters that torch sends in one collective.

    Attributes:
        parameters: Their names, as far as ``named_modules`` gives them to the module that was asked for.
        elements: Elements of all ranks together, padding included.
        shard_elements: Elements of one rank, padding included; 0 where every rank has all.
        size_bytes: Bytes of ``elements``.
        groups: Names of the process groups that they are sent in.
    """

    parameters: tuple[str, ...]
    elements: int
    shard_elements: int
    size_bytes: int
    groups: tuple[str, ...]


def ddp_buckets(module: Any) -> list[list[SentTogether]]:
    """The buckets of a ``DistributedDataParallel``, in the order in which they are reduced; nothing for other modules.

    Two lists where DDP makes new ones after the first step, in the order in which the gradients came: which is taken
    to be that of the parameters, backwards. To ask DDP (``_get_ddp_logging_data``) would wait for the lock that its
    reducer holds for as long as it waits for a bucket (seen with torch 2.13).
    """
    if not isinstance(module, DistributedDataParallel):
        return []
    first, later = _c10d._DEFAULT_FIRST_BUCKET_BYTES, int(module.bucket_bytes_cap)
    # Not in older releases, in which the default could not be told from the same size given by the user.
    config: Any = getattr(module, "_bucket_config", None)
    caps = [min(getattr(config, "first_bucket_bytes_cap", first), later), later]
    caps = [*getattr(config, "per_bucket_bytes_caps", ())] or caps
    parameters: list[Any] = list(module._module_parameters)
    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    if module.find_unused_parameters and not module.static_graph:
        return [_buckets(module, names, parameters, caps)[::-1]]
    backwards = parameters[::-1]
    unlimited = [sum(map(_bytes_of, parameters)) + 1]
    return [_buckets(module, names, backwards, limits) for limits in (caps, unlimited)]


def sends_buffers(module: Any) -> bool:
    """Whether each forward pass, also one that evaluates, begins with a broadcast of the module's buffers."""
    ddp: Any = module
    return isinstance(module, DistributedDataParallel) and bool(ddp.will_sync_module_buffers())


def _buckets(module: Any, names: dict[int, str], parameters: list[Any], caps: list[int]) -> list[SentTogether]:
    indices, _ = _c10d._compute_bucket_assignment_by_size(parameters, caps)
    buckets = [[parameters[index] for index in bucket] for bucket in indices]
    return [
        SentTogether(
            parameters=tuple(names.get(id(parameter), "?") for parameter in bucket),
            elements=sum(parameter.numel() for parameter in bucket),
            shard_elements=0,
            size_bytes=sum(map(_bytes_of, bucket)),
            groups=_group_names(module.process_group),
        )
        for bucket in buckets
    ]


def _bytes_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _group_names(*groups: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group.group_name for group in groups if group is not None))


def fsdp_units(module: Any) -> list[SentTogether]:
    """What FSDP or FSDP2 sends for this very module, those below it aside; nothing where it is not wrapped."""
    handle = getattr(module, "_handle", None)
    if handle is not None and hasattr(handle, "flat_param"):
        return [_flat_unit(module, handle)]
    return [_sharded_unit(module, group) for group in _param_groups(module)]


def _param_groups(module: Any) -> list[Any]:
    """FSDP2's own of this very module."""
    state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    # A list from torch 2.12 on.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _flat_unit(module: Any, handle: Any) -> SentTogether:
    flat = handle.flat_param
    # The parameter itself is one rank's share or all of it, by turns.
    shard = flat._sharded_size.numel()
    elements = shard * handle.process_group.size() if handle.uses_sharded_strategy else 0
    elements = elements or flat._unpadded_unsharded_size.numel()
    return SentTogether(
        parameters=tuple(flat._fqns),
        elements=elements,
        shard_elements=shard if handle.uses_sharded_strategy else 0,
        size_bytes=elements * flat.element_size(),
        groups=_group_names(handle.process_group, getattr(module, "_inter_node_pg", None)),
    )


def _sharded_unit(module: Any, group: Any) -> SentTogether:
    owners = {id(inner): f"{name}." if name else "" for name, inner in module.named_modules()}
    sent = [(parameter, parameter.padded_sharded_param_size.numel()) for parameter in group.fsdp_params]
    infos = [parameter._module_info for parameter, _ in sent]
    mesh = group.mesh_info
    ranks = mesh.shard_process_group.size()
    wanted = ("_all_gather_process_group", "_reduce_scatter_process_group", "_all_reduce_process_group")
    names = [name for name in wanted if name != "_all_reduce_process_group" or group._is_hsdp]
    return SentTogether(
        parameters=tuple(f"{owners.get(id(info.module), '')}{info.param_name}" for info in infos),
        elements=sum(count for _, count in sent) * ranks,
        shard_elements=sum(count for _, count in sent),
        size_bytes=sum(count * parameter.sharded_param.element_size() for parameter, count in sent) * ranks,
        groups=_group_names(mesh.shard_process_group, *(getattr(group, name, None) for name in names)),
    )


def spread_size(parameter: Any) -> tuple[int, int] | None:
    """Elements of a DTensor: of all ranks together, and of this one; None for a tensor that is not spread."""
    local = getattr(parameter, "_local_tensor", None)
    return None if local is None else (int(parameter.numel()), int(local.numel()))


def largest(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each: any order of comparing gives the same, and the device is not waited for."""
    with torch.no_grad():
        # A split tensor would ask other ranks.
        own = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
        return [each.abs().max() if each.numel() and each.dtype is not torch.bool else each.sum() for each in own]


def change_counts(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each has been changed in place: torch counts that for autograd, but for writes through ``.data``.

    Of a DTensor and of the part that it is around: each counts only what it was told to do itself.
    """
    return [
        tensor._version + (local._version if (local := getattr(tensor, "_local_tensor", None)) is not None else 0)
        for tensor in tensors
    ]


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Of each buffer that is saved with a module: its whole name, where it is kept, and under which name."""
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), part._buffers, name


def copy_all(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copies tensors into others, in one call."""
    with torch.no_grad():
        torch._foreach_copy_(copies, tensors)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, and as what; two views that are the same have the same."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def queue_event() -> torch.cuda.Event:
    """An event behind all that the calling thread has queued on its device until now."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def was_aborted() -> bool:
    """Whether a group of NCCL has met an error: what was queued behind its collectives may have run on partial sums.

    Also true where that cannot be asked.
    """
    for group in _groups_here():
        backend = _backend_of(group, "cuda")
        if backend is not None and "nccl" in backend.name().lower():
            error = getattr(backend, "get_error", None)
            if error is None or int(error()) != 0:
                return True
    return False


def to_host(value: Any) -> Any:
    """A copy of nested containers with all tensors on the host: over a stream that waits for no other one.

    What is queued on the device meanwhile, and may never run, is not waited for.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.cuda.stream(stream):
        return _to_host(value)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu")
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update({key: _to_host(each) for key, each in value.items()})
        return moved
    if type(value) in (list, tuple, set):
        return type(value)(map(_to_host, value))
    return value


def save(value: Any, file: BinaryIO) -> None:
    """Writes a value as ``torch.load`` reads it."""
    torch.save(value, file)


def load_plain(file: Any) -> Any:
    """Reads tensors and plain data, and nothing that could run; the tensors of a path are not read for that."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, (str, os.PathLike)) or None)


class FlatPart(NamedTuple):
    """What this rank has of a parameter that FSDP has made a part of a flat one, which is cut into equal pieces.

    Attributes:
        name: As in the model without FSDP.
        parameter: As optimizers know it.
        shape: Of the whole.
        begin: The first value that is here, counted through the whole.
        numel: Number of values that are here.
        values: Gives them as they are now.
    """

    name: str
    parameter: Any
    shape: tuple[int, ...]
    begin: int
    numel: int
    values: Callable[[], torch.Tensor]


class UnknownSplitError(Exception):
    """A model is split in a way that cannot be read on one rank alone; the message says how."""


def flat_parts(model: torch.nn.Module) -> Iterator[FlatPart]:
    """Each parameter of FSDP; nothing where the model is not FSDP's.

    Raises:
        UnknownSplitError: FSDP was told something with which Lightning loads no sharded checkpoint, or that keeps
            optimizers from knowing the parameters.
    """
    for prefix, module in model.named_modules():
        handle: Any = getattr(module, "_handle", None)
        if handle is None or not hasattr(handle, "flat_param"):
            continue
        flat = handle.flat_param
        if not handle.uses_sharded_strategy:
            raise UnknownSplitError("FSDP with NO_SHARD has no sharded checkpoints")
        if flat._params is None:
            raise UnknownSplitError("FSDP with use_orig_params=False lets optimizers see only flat parameters")
        if flat._shared_param_infos:
            raise UnknownSplitError("FSDP keeps parameters that modules share in a way of its own")
        before = f"{prefix}." if prefix else ""
        infos: Any = zip(flat._fqns, flat._params, flat._shapes, flat._shard_param_infos, strict=True)
        for name, parameter, shape, info in infos:
            begin, numel = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
            yield FlatPart(
                name=_saved_name(f"{before}{name}"),
                parameter=parameter,
                shape=tuple(shape),
                begin=info.intra_param_start_idx if info.in_shard else 0,
                numel=numel,
                values=partial(_flat_values, flat, begin, numel),
            )


def _flat_values(flat: Any, begin: int, numel: int) -> torch.Tensor:
    # The parameter itself is one rank's share or all of it, by turns; only that share before the first batch.
    values: torch.Tensor = getattr(flat, "_local_shard", flat)
    return values.detach()[begin : begin + numel]


def _saved_name(name: str) -> str:
    """The name in a checkpoint: without what wraps modules to split, recompute or compile them."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def split_parameters(model: torch.nn.Module) -> dict[str, Any]:
    """All parameters by their names in a checkpoint, those of FSDP2 as optimizers know them.

    In the middle of a batch the module has whole parameters in their places.
    """
    split: dict[tuple[int, str], Any] = {}
    for module in model.modules():
        for parameter in (one for group in _param_groups(module) for one in group.fsdp_params):
            info = parameter._module_info
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            split |= {(id(owner), name): parameter.sharded_param for owner, name in owners}
    return {
        _saved_name(f"{prefix}.{name}".removeprefix(".")): split.get((id(module), name), parameter)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def plain_buffers(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """As :func:`saved_buffers`, by their names in a checkpoint."""
    for name, owner, key in saved_buffers(model):
        yield _saved_name(name), owner, key


def saved_names(model: torch.nn.Module, *, is_flat: bool) -> set[str]:
    """The names that the model's own way to its state gives, without a collective.

    Args:
        model: The model.
        is_flat: Whether it is FSDP's, which gathers whole parameters for that: then the names of what is registered,
            and of what modules add that save in their own way.
    """
    if not is_flat:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return {*get_model_state_dict(model)}
    found = {part.name for part in flat_parts(model)} | {name for name, _, _ in plain_buffers(model)}
    for prefix, module in model.named_modules():
        kind, before = type(module), _saved_name(f"{prefix}.")
        if kind.get_extra_state is not torch.nn.Module.get_extra_state:
            found.add(f"{before}_extra_state".removeprefix("."))
        elif kind.state_dict is not torch.nn.Module.state_dict and not [*flat_parts(module)]:
            found |= {f"{before}{name}".removeprefix(".") for name in module.state_dict()}
    managed = {id(part.parameter) for part in flat_parts(model)}
    # What FSDP was told to ignore is saved as it is.
    found |= {_saved_name(name) for name, parameter in model.named_parameters() if id(parameter) not in managed}
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()


def split_of(value: Any) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]], Any] | None:
    """Of a DTensor its shape, where this rank's part lies in it, and the part; None of anything else.

    Raises:
        UnknownSplitError: Ranks have summands of it.
    """
    if not hasattr(value, "_local_tensor"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise UnknownSplitError("a tensor of the model is a sum over ranks that has not been made")
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(value.shape), [(tuple(offsets), tuple(sizes))], value._local_tensor


def is_tensor(value: Any) -> bool:
    """Whether it is one."""
    return isinstance(value, torch.Tensor)


def import_checkpointing() -> None:
    """What is needed in the end: imports may wait for the main thread then."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.tensor._utils  # noqa: F401


def flattened(state: Any) -> Iterator[tuple[list[str | int], Any]]:
    """The entries of a nested state, each with its path, as torch.distributed.checkpoint takes them apart."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    values, paths = flatten_state_dict(state)
    for name, value in values.items():
        yield [*paths[name]], value


def save_part(value: Any, file: BinaryIO) -> None:
    """As :func:`save`; of a view only what it shows."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone()
    torch.save(value, file)


class StoredChunk(NamedTuple):
    """A part of a tensor, or another value, in a file of a distributed checkpoint."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class StoredEntry(NamedTuple):
    """One entry of a distributed checkpoint; without a type a value that is no tensor."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str
    chunks: list[StoredChunk]


def distributed_metadata(entries: Iterable[StoredEntry]) -> bytes:
    """The content of ``.metadata``, by which PyTorch finds everything else.

    Raises:
        ValueError: There is no such type of tensors.
    """
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    stored: dict[Any, Any] = {}
    for entry in entries:
        name = ".".join(map(str, entry.path))
        paths[name] = entry.path
        if entry.dtype:
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r} is of {entry.dtype!r}, which is no type of tensors")
            described[name] = metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in entry.chunks
                ],
            )
        else:
            described[name] = metadata.BytesStorageMetadata()
        for number, chunk in enumerate(entry.chunks):
            index = (
                metadata.MetadataIndex(name, torch.Size(chunk.offsets), number)
                if entry.dtype
                else metadata.MetadataIndex(name)
            )
            stored[index] = _StorageInfo(chunk.file, chunk.begin, chunk.length)
    found = metadata.Metadata(
        state_dict_metadata=described, planner_data=paths, storage_data=stored, storage_meta=metadata.StorageMeta()
    )
    found.version = "1.0.0"
    return pickle.dumps(found)
