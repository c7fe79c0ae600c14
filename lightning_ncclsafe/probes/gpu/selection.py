"""Which GPU a rank uses, as NVML knows it: NVML sees all of the host's, CUDA those that the environment names."""

from collections.abc import Iterator
from typing import Any

from lightning_ncclsafe.probes.absent import or_none


def own_gpu(nvml: Any, local_rank: int, visible: str | None) -> Any:
    """NVML's handle of a rank's GPU, or of its MIG instance; None where it has none.

    CUDA counts the fastest GPU first and NVML by place on the bus, which is the same where all are of one model.

    Args:
        nvml: The module ``pynvml``, initialised.
        local_rank: Rank on this host.
        visible: ``CUDA_VISIBLE_DEVICES``: indexes, UUIDs or their beginnings, MIG instances; None where it is not set.

    Raises:
        nvml.NVMLError: If NVML does not tell.
    """
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(local_rank)
    names = list(_names(visible))
    # Where the launcher shows each rank a GPU of its own, this is the first one for all of them.
    place = 0 if len(names) == 1 else local_rank
    return _handle(nvml, names[place]) if place < len(names) else None


def physical_gpu(nvml: Any, handle: Any) -> Any:
    """The GPU that a MIG instance is a part of; any other one is itself."""
    return or_none(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle


def _names(visible: str) -> Iterator[str]:
    """CUDA sees those before the first name that is none: ``"0,-1,1"`` shows one GPU."""
    for name in visible.split(","):
        name = name.strip()
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            return
        yield name


def _handle(nvml: Any, name: str) -> Any:
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    whole = or_none(lambda: nvml.nvmlDeviceGetHandleByUUID(name))
    return whole or _by_beginning(nvml, name)


def _by_beginning(nvml: Any, name: str) -> Any:
    """CUDA takes any beginning of a UUID that is the only one of its kind."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return next((handle for handle in handles if as_text(nvml.nvmlDeviceGetUUID(handle)).startswith(name)), None)


def as_text(value: Any) -> str:
    """Older releases of the binding give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
