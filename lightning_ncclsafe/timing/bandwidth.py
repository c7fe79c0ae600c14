"""Algorithm and bus bandwidth, as nccl-tests defines them.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md and its ``src/*.cu``. The algorithm
bandwidth is a size over the time; the bus bandwidth multiplies it with a factor that makes it comparable with the
hardware's bandwidth, whatever the number of ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

_Factor = Callable[[int], float]


class Bandwidth(NamedTuple):
    """Bytes a second."""

    algorithm: float
    bus: float


# By the name that PyTorch's back ends give the operation: how often the input of one rank is the size that counts, and
# the factor of the bus bandwidth, for n ranks.
_DEFINITIONS: dict[str, tuple[_Factor, _Factor]] = {
    "all_reduce": (lambda n: 1, lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda n: n, lambda n: (n - 1) / n),
    "reduce_scatter": (lambda n: 1, lambda n: (n - 1) / n),
    "all_to_all": (lambda n: 1, lambda n: (n - 1) / n),
    "broadcast": (lambda n: 1, lambda n: 1),
    "reduce": (lambda n: 1, lambda n: 1),
    "send": (lambda n: 1, lambda n: 1),
    "recv": (lambda n: 1, lambda n: 1),
    "gather": (lambda n: n, lambda n: (n - 1) / n),
    "scatter": (lambda n: n, lambda n: (n - 1) / n),
}

# Names of one and the same operation, without a leading underscore.
_SAME = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allgather_coalesced": "all_gather",
    "reduce_scatter_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall_single": "all_to_all",
}


def bandwidth(op: str, *, ranks: int, size_bytes: float, seconds: float) -> Bandwidth | None:
    """Algorithm and bus bandwidth of an operation.

    Args:
        op: The operation by PyTorch's name for it, e.g. ``"all_reduce"`` or ``"_all_gather_base"``.
        ranks: Number of ranks that take part.
        size_bytes: Bytes that one rank puts in.
        seconds: Time that it takes once all ranks have arrived.

    Returns:
        None for an operation without a definition, or without a time.
    """
    definition = _DEFINITIONS.get(plain_op(op))
    if definition is None or seconds <= 0 or ranks < 1:
        return None
    size_factor, bus_factor = definition
    algorithm = size_bytes * size_factor(ranks) / seconds
    return Bandwidth(algorithm, algorithm * bus_factor(ranks))


def plain_op(op: str) -> str:
    """One name for an operation, whichever of its names a back end has recorded: "send 0->1" is a send."""
    name = op.strip().lower().lstrip("_").split(" ")[0]
    return _SAME.get(name, name)
