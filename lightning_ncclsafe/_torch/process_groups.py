"""Process groups of this process: their members, counters and timeouts."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.raised import text_of
from lightning_ncclsafe.facts import of_backend


class OwnGroup(NamedTuple):
    """A process group of this process, or one of its back ends: unique name, description, global ranks of members."""

    name: str
    description: str
    ranks: tuple[int, ...]


class GroupCalls(NamedTuple):
    """What a process group, or one of its back ends, counts itself, with or without a recorder.

    Attributes:
        name: Its unique name.
        backend: Name of its back end; empty if unknown.
        called: How many collectives this process has called in it; None if its back end does not count them.
    """

    name: str
    backend: str
    called: int | None


def group_calls() -> list[GroupCalls]:
    """The counters of this process's groups, which no setting turns off. Takes some microseconds."""
    return [GroupCalls(one.name, one.backend, one.called()) for one in _sequences()]


class _Sequence(NamedTuple):
    """The collectives that are numbered together: those of a group, or of one of its back ends if it has several.

    Attributes:
        name: The group's, with the back end's added unless it is the first for a device.
        description: Likewise.
        backend: Name of the back end; empty if unknown.
        device: A device that the back end is for, if the group has several; otherwise empty.
        group: torch's own.
    """

    name: str
    description: str
    backend: str
    device: str
    group: Any

    def called(self) -> int | None:
        """How many collectives this process has called; None if they are not counted."""
        return _count(self.group, self.device)


def _count(group: Any, device: str) -> int | None:
    with suppress(RuntimeError):  # the back end does not count
        counts = group._get_backend(torch.device(device)) if device else group
        return int(counts._get_sequence_number_for_group())
    return None


def _sequences() -> list[_Sequence]:
    return [sequence for group in groups_here() for sequence in _sequences_of(group)]


def _sequences_of(group: Any) -> list[_Sequence]:
    """The first one has the group's own name, on all ranks alike, whatever they have called so far."""
    name, description = group.group_name, group.group_desc
    backends = _backends(group)
    if len(backends) < 2:
        return [_Sequence(name, description, next(iter(backends), ""), "", group)]
    first, *others = backends
    return [
        _Sequence(name, description, first, backends[first], group),
        *(
            _Sequence(of_backend(name, other), of_backend(description, other), other, backends[other], group)
            for other in others
        ),
    ]


# Asked for with every tick, and never changed.
_backends_of: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def _backends(group: Any) -> dict[str, str]:
    """Its back ends, each with the first of its devices, the CPU's last: ``{"nccl": "cuda", "gloo": "cpu"}``."""
    known = _backends_of.get(group)
    if known is not None:
        return known
    try:
        config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    except (KeyError, TypeError, ValueError):  # it is being created, or has just been destroyed
        return {}
    backends: dict[str, str] = {}
    for part in config.split(","):
        device, _, backend = part.rpartition(":")
        backends.setdefault(backend, device)
    _backends_of[group] = known = dict(sorted(backends.items(), key=lambda one: one[1] == "cpu"))
    return known


def names_by_backend() -> dict[tuple[str, str], tuple[str, str]]:
    """Name and description for back ends that do not have the group's own, by the group's name and the back end's."""
    return {
        (group.group_name, one.backend): (one.name, one.description)
        for group in groups_here()
        for one in _sequences_of(group)[1:]
    }


def counts() -> tuple[int | None, ...]:
    """How many collectives this process has called in each of its groups; takes some microseconds a group."""
    return tuple(_count(group, device) for group in groups_here() for device in _counted_devices(group))


def _counted_devices(group: Any) -> Iterable[str]:
    backends = _backends(group)
    return backends.values() if len(backends) > 1 else ("",)


def calls_besides(descriptions: Collection[str]) -> int:
    """How many collectives this process has called in its groups, except those with these descriptions."""
    counted = (one.called() for one in _sequences() if one.description not in descriptions)
    return sum(count for count in counted if count is not None)


def groups_made() -> int:
    """How many process groups this process has taken part in making, as a member or not; -1 before the first."""
    return dist.distributed_c10d.get_pg_count() if distributed_is_initialized() else -1


def own_groups() -> list[OwnGroup]:
    """The process groups that this process is a member of."""
    if not distributed_is_initialized():
        return []
    # A copy first: user code may create groups while another thread reads. Where this process is not a member, torch
    # keeps a number in the group's place.
    members: list[tuple[Any, dict[int, int]]] = [*dist.distributed_c10d._world.pg_group_ranks.items()]
    return [
        OwnGroup(one.name, one.description, tuple(sorted(ranks)))
        for group, ranks in members
        if isinstance(group, dist.ProcessGroup)
        for one in _sequences_of(group)
    ]


def distributed_is_initialized() -> bool:
    """Whether this build has ``torch.distributed`` and the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception only reports that a collective failed: a peer is gone or late, or it was aborted.

    Gloo has no exception type: it raises ``RuntimeError`` with its source path or a socket's error in the
    text.
    """
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(mark in text_of(error) for mark in _GLOO_MARKS)


_GLOO_MARKS = (
    "gloo/",
    "Connection closed by peer",
    "Application timeout caused pair closure",
    "Connection reset by peer",
    "Broken pipe",
    "Gloo connect",
    "[c10d]",
)


@marked(Mark.VOTE)
def wait_for_vote(work: Any, tensor: Any) -> int:
    """Waits for a vote; returns the flags that any rank has set."""
    work.wait()
    return int(tensor.item())


class VoteGroup:
    """A gloo process group of this package for asynchronous votes; all ranks create it together.

    Args:
        timeout_s: Seconds after which a vote fails if not all ranks take part.
        connect_s: Seconds for ranks to connect.

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
        """Starts a vote without waiting for it.

        Returns:
            A function that waits for it and returns the flags that any rank has set.
        """
        # One element: for more, gloo sends several messages, which takes three times the processor time.
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
        """Destroys the group, unless a vote on it has not ended: waiting for that could take forever."""
        if all(work.is_completed() for work in self._works):
            with suppress(Exception):
                dist.destroy_process_group(self._group)


def time_collectives_on_device() -> int:
    """Makes NCCL's back ends of this process record how long each collective takes on the device.

    As ``TORCH_NCCL_ENABLE_TIMING=1`` does, but for groups that exist already. It adds two CUDA events to a collective
    and no synchronisation.

    Returns:
        The number of back ends that now do.

    Raises:
        AttributeError: If this torch cannot.
    """
    groups = [group for group, _ in _nccl_backends()]
    for group in groups:
        # Only the group has this binding; it passes it on to its back ends.
        group._enable_collectives_timing()
    return len(groups)


def groups_here() -> list[Any]:
    if not distributed_is_initialized():
        return []
    return [*dist.distributed_c10d._world.pg_map]


def _nccl_backends() -> Iterator[tuple[Any, Any]]:
    """The groups of this process that use NCCL, each with its back end for CUDA."""
    for group in groups_here():
        with suppress(RuntimeError):  # the group has no back end for CUDA
            backend = group._get_backend(torch.device("cuda"))
            if "nccl" in backend.name().lower():
                yield group, backend


class TimedGroup(NamedTuple):
    """A process group whose back end has a timeout that can be set.

    Attributes:
        timeout_s: Seconds; the longest if it has several back ends.
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
    """The process groups that this process is a member of; except those whose timeout cannot be set."""
    timeouts = [(group, _timeout_s(group)) for group in groups_here()]
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


def was_aborted() -> bool:
    """Whether an NCCL group has had an error: work queued behind its collectives may have used partial sums.

    Also true if that cannot be determined.
    """
    errors = (getattr(backend, "get_error", None) for _, backend in _nccl_backends())
    return any(error is None or int(error()) != 0 for error in errors)


# c10d::OpType in torch/csrc/distributed/c10d/Work.hpp: SEND, RECV, RECVANYSOURCE.
_SENDS, _RECEIVES = (12,), (13, 14)
SEND, RECEIVE, OTHER = "send", "recv", "other"


def operation(work: Any) -> str:
    """`SEND`, `RECEIVE` or `OTHER`, of a ``torch.distributed.Work``; empty for what is none, or in some releases.

    Gloo's recorder does not have sends and receives.
    """
    number = getattr(work, "_get_op_type", lambda: None)() if isinstance(work, dist.Work) else None
    if number is None:
        return ""
    return SEND if number in _SENDS else RECEIVE if number in _RECEIVES else OTHER
