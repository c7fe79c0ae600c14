"""The GPU of one rank, as NVML tells; needs no CUDA context, and makes none."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import psutil

from lightning_ncclsafe.facts import GpuFacts, GpuStateFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.gpu.selection import as_text, own_gpu, physical_gpu
from lightning_ncclsafe.probes.gpu.xids import KERNEL_LOGS, xids

T = TypeVar("T")

# From nvml.h, whose names the binding has changed; what power saving and the user's own settings do is left out.
_UNCORRECTED, _VOLATILE = 1, 0
_THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
_RECOVERY_FIELD = 230
_RECOVERY = {
    1: "reset",
    2: "reboot",
    3: "drain",
    4: "drain and reset",
    5: "recover IMEX domain",
    6: "reset the bus",
    7: "reboot",
}


def gpu_facts(
    local_rank: int,
    *,
    own_pids: Collection[int] = (),
    nvml: Any = None,
    environment: Mapping[str, str] = os.environ,
    kernel_logs: Collection[str] = KERNEL_LOGS,
) -> GpuFacts | None:
    """What NVML says of this rank's GPU; None without a driver or a GPU. What it does not say is None or empty.

    Args:
        local_rank: Rank on this host.
        own_pids: Processes of this job, which are not foreign.
        nvml: The module ``pynvml``; by default it is imported.
        environment: Of this process.
        kernel_logs: Where the kernel's log may be.
    """
    own = {os.getpid(), *own_pids}
    return _read(local_rank, nvml, environment, lambda nvml, handle: _facts(nvml, handle, local_rank, own, kernel_logs))


def gpu_state(
    local_rank: int,
    *,
    own_pids: Collection[int] = (),
    nvml: Any = None,
    environment: Mapping[str, str] = os.environ,
    kernel_logs: Collection[str] = KERNEL_LOGS,
) -> GpuStateFacts | None:
    """The same with what the GPU does at this moment; None without a driver or a GPU.

    Args:
        local_rank: Rank on this host.
        own_pids: Processes of this job, which are not foreign.
        nvml: The module ``pynvml``; by default it is imported.
        environment: Of this process.
        kernel_logs: Where the kernel's log may be.
    """
    own = {os.getpid(), *own_pids}

    def state(nvml: Any, handle: Any) -> GpuStateFacts:
        return GpuStateFacts(
            gpu=_facts(nvml, handle, local_rank, own, kernel_logs),
            utilization=or_none(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100),
            power_w=or_none(lambda: int(nvml.nvmlDeviceGetPowerUsage(physical_gpu(nvml, handle))) / 1000),
        )

    return _read(local_rank, nvml, environment, state)


def _read(local_rank: int, nvml: Any, environment: Mapping[str, str], facts: Callable[[Any, Any], T]) -> T | None:
    nvml = nvml or or_none(_binding)
    if nvml is None or or_none(lambda: (nvml.nvmlInit(),)) is None:
        return None
    try:
        handle = or_none(lambda: own_gpu(nvml, local_rank, environment.get("CUDA_VISIBLE_DEVICES")))
        return None if handle is None else facts(nvml, handle)
    finally:
        # Counted: torch's own use of it goes on.
        or_none(lambda: nvml.nvmlShutdown())


def _binding() -> Any:
    import pynvml

    return pynvml


def _facts(nvml: Any, handle: Any, local_rank: int, own: Collection[int], kernel_logs: Collection[str]) -> GpuFacts:
    whole = physical_gpu(nvml, handle)
    memory = or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    index = or_none(lambda: int(nvml.nvmlDeviceGetIndex(whole)))
    bus_id = _text(lambda: nvml.nvmlDeviceGetPciInfo(whole).busId)
    return GpuFacts(
        index=local_rank if index is None else index,
        name=_text(lambda: nvml.nvmlDeviceGetName(handle)),
        uuid=_text(lambda: nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=or_none(lambda: int(memory.total)) if memory else None,
        free_bytes=or_none(lambda: int(memory.free)) if memory else None,
        foreign_processes=tuple(or_none(lambda: list(_foreign(nvml, handle, own))) or ()),
        ecc_errors=or_none(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(whole, _UNCORRECTED, _VOLATILE))),
        pending_repair=or_none(lambda: any(nvml.nvmlDeviceGetRemappedRows(whole)[2:4])),
        throttled_by=tuple(name for bit, name in _THROTTLING.items() if (_clock_limits(nvml, whole) or 0) & bit),
        recovery_action=or_none(lambda: _recovery_action(nvml, whole)) or "",
        xids=xids(bus_id, kernel_logs) if bus_id else (),
        driver=_text(lambda: nvml.nvmlSystemGetDriverVersion()),
        cuda=or_none(lambda: _version(nvml.nvmlSystemGetCudaDriverVersion())) or "",
    )


def _text(read: Callable[[], Any]) -> str:
    return or_none(lambda: as_text(read())) or ""


def _version(number: int) -> str:
    """CUDA counts 12.4 as 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _clock_limits(nvml: Any, handle: Any) -> int | None:
    """Since driver 535 a reason why clocks are held down is called an event."""
    limits = or_none(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    return or_none(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) if limits is None else limits


def _recovery_action(nvml: Any, handle: Any) -> str:
    """Told by drivers from 570 on."""
    (told,) = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])
    return "" if told.nvmlReturn else _RECOVERY.get(int(told.value.uiVal), "")


def _foreign(nvml: Any, handle: Any, own: Collection[int]) -> Iterator[str]:
    """Processes that compute on a GPU and are none of ours.

    In a container NVML gives the host's process ids. One that cannot be found here is a stranger only where our own
    are told with the ids that we know them by; otherwise it may be ourselves.
    """
    processes = {process.pid: process for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    ids_are_ours = any(pid in own for pid in processes)
    for pid, process in processes.items():
        name = or_none(partial(_name, pid))
        if pid not in own and (name is not None or ids_are_ours):
            used = getattr(process, "usedGpuMemory", None)
            yield f"pid {pid} ({name or 'not visible from here'})" + (f", {used / 1e9:.1f} GB" if used else "")


def _name(pid: int) -> str:
    return psutil.Process(pid).name()
