"""The GPU of one rank, from NVML and the kernel's log; neither needs nor creates a CUDA context."""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import psutil

from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.facts import GpuFacts, GpuStateFacts
from lightning_ncclsafe.probes.absent import or_none

# Values from nvml.h, as their names in the binding have changed; without power saving and the user's own settings.
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

# The first is readable by all unless kernel.dmesg_restrict is set; some distributions write the other at each boot.
KERNEL_LOGS = ("/dev/kmsg", "/var/log/dmesg")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
# A record of the kernel's log has at most 8 KiB, and the buffer holds some ten thousand.
_RECORD_BYTES = 8192
_MOST_RECORDS = 50_000
_MOST_S = 0.3
_NEWEST = 8
# NVIDIA's "Xid Errors", shortened.
_MEANINGS = {
    48: "double-bit ECC error",
    61: "microcontroller breakpoint",
    62: "microcontroller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    145: "NVLink RLW error",
    149: "NVLink NETIR error",
    154: "recovery action changed",
}
# Errors that programs cause themselves, also when they are killed: exception, page fault, stopped, cleaned up.
_OF_PROGRAMS = (13, 31, 43, 45)


def gpu_facts(local_rank: int) -> GpuFacts | None:
    """This rank's GPU as NVML reports it; None without a driver or a GPU."""
    state = gpu_state(local_rank)
    return state.gpu if state is not None else None


def gpu_state(
    local_rank: int,
    *,
    own_pids: Collection[int] = (),
    nvml: Any = None,
    environment: Mapping[str, str] = os.environ,
    kernel_logs: Collection[str] = KERNEL_LOGS,
) -> GpuStateFacts | None:
    """This rank's GPU and its present load; None without a driver or a GPU. Unreported values are None or empty.

    Args:
        local_rank: Rank on this host.
        own_pids: Processes of this job, which are not foreign.
    """
    nvml = nvml or or_none(partial(import_module, "pynvml"))
    if nvml is None or or_none(lambda: (nvml.nvmlInit(),)) is None:
        return None
    try:
        handle = or_none(lambda: own_gpu(nvml, local_rank, environment.get("CUDA_VISIBLE_DEVICES")))
        if handle is None:
            return None
        return GpuStateFacts(
            gpu=_facts(nvml, handle, local_rank, {os.getpid(), *own_pids}, kernel_logs),
            utilization=or_none(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100),
            power_w=or_none(lambda: int(nvml.nvmlDeviceGetPowerUsage(physical_gpu(nvml, handle))) / 1000),
        )
    finally:
        # NVML counts init and shutdown, so torch's own use is not affected.
        or_none(lambda: nvml.nvmlShutdown())


class GpuWatch:
    """Reads the state of a GPU, without waiting for a driver that does not answer.

    Torch is not asked about memory: it would wait, with the GIL held, for a lock that the allocator holds while it
    waits for the device.

    Args:
        ask: Gives the state; None if there is no GPU.
    """

    def __init__(self, ask: Callable[[], GpuStateFacts | None]) -> None:
        self._ask = ask
        self._question = SideThread("ncclsafe-gpu")

    def begin(self) -> None:
        """Asks, unless an earlier question is still unanswered."""
        self._question.begin(self._ask)

    def read(self, deadline_s: float) -> GpuStateFacts | None:
        """The answer within the deadline, or for how long there has been none; None if there is no GPU."""
        if not self._question.began_s:
            return None
        try:
            state: GpuStateFacts | None = self._question.answer(deadline_s)
            return state
        except UnansweredError:
            return GpuStateFacts(no_answer_s=round(time.monotonic() - self._question.began_s, 3))
        except Exception:  # unknown, if the driver does not report it
            return None


def _facts(nvml: Any, handle: Any, local_rank: int, own: Collection[int], kernel_logs: Collection[str]) -> GpuFacts:
    whole = physical_gpu(nvml, handle)
    memory: Any = or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    index = or_none(lambda: int(nvml.nvmlDeviceGetIndex(whole)))
    bus_id = _text(lambda: nvml.nvmlDeviceGetPciInfo(whole).busId)
    # 12040 is 12.4.
    cuda = or_none(lambda: int(nvml.nvmlSystemGetCudaDriverVersion()))
    return GpuFacts(
        index=local_rank if index is None else index,
        name=_text(lambda: nvml.nvmlDeviceGetName(handle)),
        uuid=_text(lambda: nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=or_none(lambda: int(memory.total)),
        free_bytes=or_none(lambda: int(memory.free)),
        foreign_processes=tuple(or_none(lambda: list(_foreign(nvml, handle, own))) or ()),
        ecc_errors=or_none(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(whole, _UNCORRECTED, _VOLATILE))),
        pending_repair=or_none(lambda: any(nvml.nvmlDeviceGetRemappedRows(whole)[2:4])),
        throttled_by=tuple(name for bit, name in _THROTTLING.items() if (_clock_limits(nvml, whole) or 0) & bit),
        recovery_action=or_none(lambda: _recovery_action(nvml, whole)) or "",
        xids=xids(bus_id, kernel_logs) if bus_id else (),
        driver=_text(lambda: nvml.nvmlSystemGetDriverVersion()),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda is not None else "",
    )


def _text(read: Callable[[], Any]) -> str:
    return or_none(lambda: as_text(read())) or ""


def _clock_limits(nvml: Any, handle: Any) -> int | None:
    """The reasons why clocks are reduced, called events since driver 535."""
    limits = or_none(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    return or_none(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) if limits is None else limits


def _recovery_action(nvml: Any, handle: Any) -> str:
    """The recommended action, reported by drivers from 570 on."""
    (field,) = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])
    return "" if field.nvmlReturn else _RECOVERY.get(int(field.value.uiVal), "")


def _foreign(nvml: Any, handle: Any, own: Collection[int]) -> Iterator[str]:
    """Processes that compute on a GPU and are not ours.

    In a container, NVML may give the host's process ids. So an unknown id counts as foreign only if our own processes
    appear with the ids that we know; otherwise it may be our own.
    """
    processes = {process.pid: process for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    ids_are_ours = any(pid in own for pid in processes)
    for pid, process in processes.items():
        name = or_none(lambda pid=pid: psutil.Process(pid).name())  # type: ignore[misc]
        if pid not in own and (name is not None or ids_are_ours):
            used = getattr(process, "usedGpuMemory", None)
            yield f"pid {pid} ({name or 'not visible from here'})" + (f", {used / 1e9:.1f} GB" if used else "")


def own_gpu(nvml: Any, local_rank: int, visible: str | None) -> Any:
    """NVML's handle of a rank's GPU, or of its MIG instance; None if it has none.

    CUDA numbers the fastest GPU first, and NVML by bus order; both are the same if all GPUs are of one model.

    Args:
        local_rank: Rank on this host.
        visible: ``CUDA_VISIBLE_DEVICES``: indexes, UUIDs or their beginnings, MIG instances; None if not set.

    Raises:
        nvml.NVMLError: If NVML fails.
    """
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(local_rank)
    names = list(_names(visible))
    # If the launcher gives each rank its own GPU, that is the first one for all ranks.
    place = 0 if len(names) == 1 else local_rank
    return _handle(nvml, names[place]) if place < len(names) else None


def physical_gpu(nvml: Any, handle: Any) -> Any:
    """The GPU of a MIG instance; otherwise the GPU itself."""
    return or_none(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle


def _names(visible: str) -> Iterator[str]:
    """The names before the first invalid one, as in CUDA: ``"0,-1,1"`` shows one GPU."""
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
    """The GPU with a UUID that begins like this: CUDA accepts any unambiguous beginning."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return next((handle for handle in handles if as_text(nvml.nvmlDeviceGetUUID(handle)).startswith(name)), None)


def as_text(value: Any) -> str:
    """The value as text: older releases of the binding return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def xids(bus_id: str, logs: Iterable[str] = KERNEL_LOGS) -> tuple[str, ...]:
    """Xid errors of one GPU since the host was started, newest last, each once, at most 8.

    Errors that programs cause themselves are left out.

    Args:
        bus_id: Its bus id from NVML (``"00000000:3B:00.0"``).
        logs: Possible files of the kernel's log; the first readable one is used.
    """
    text = next((text for log in logs if (text := or_none(partial(_driver_lines, log))) is not None), [])
    own = [int(found[2]) for line in text if (found := _XID.search(line)) and _place(found[1]) == _place(bus_id)]
    # Keeps the order; of equal ones, the last.
    newest = [xid for xid in dict.fromkeys(reversed(own)) if xid not in _OF_PROGRAMS][:_NEWEST]
    return tuple(f"{xid} ({_MEANINGS[xid]})" if xid in _MEANINGS else str(xid) for xid in reversed(newest))


def _place(bus_id: str) -> str:
    """Domain, bus and device: the driver leaves the function out, and NVML writes eight digits of the domain."""
    parts = bus_id.lower().partition(".")[0].split(":")
    return ":".join([parts[0][-4:], *parts[1:]])


def _driver_lines(log: str) -> list[str]:
    # Does not wait for new records.
    file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        whole = b"".join(_log_records(file))
    finally:
        os.close(file)
    return [line for line in whole.decode(errors="replace").splitlines() if "NVRM" in line]


def _log_records(file: int) -> Iterator[bytes]:
    ends_s = time.monotonic() + _MOST_S
    for _ in range(_MOST_RECORDS):
        try:
            data = os.read(file, _RECORD_BYTES)
        except BrokenPipeError:  # the kernel has overwritten the next record; the next read gives the oldest
            continue
        except BlockingIOError:
            return
        if not data or time.monotonic() > ends_s:
            return
        yield data
