"""GPUs by a made-up NVML: which one is a rank's, what is told of it, and every function that may be missing."""

import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightning_ncclsafe.facts import GpuFacts, GpuStateFacts
from lightning_ncclsafe.probes.gpu import GpuWatch, gpu_facts, gpu_state, xids

GB = 10**9
PEER, HIDDEN = 2**22 + 1, 2**22 + 2
# Nothing comes near it unless a test makes it.
AMPLE_S = 20.0


class NVMLError(Exception):
    """As the binding's own."""


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    is_mig: bool = False


class Nvml:
    """Two GPUs, the second of which has a MIG instance; names are the binding's."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.open = 0
        self.clock_limits, self.remapped, self.recovery = 0, (3, 0, 0, 0), 0
        self.processes = [(os.getpid(), 2 * GB), (PEER, 2 * GB)]
        self.gpus = [Gpu(0, "GPU-aaaa-1"), Gpu(1, "GPU-bbbb-2"), Gpu(1, "MIG-cccc-3", is_mig=True)]

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "refused"):
            raise NVMLError(f"{name}: not supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if index >= 2:
            raise NVMLError("invalid argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError("not found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: Gpu) -> Gpu:
        if not gpu.is_mig:
            raise NVMLError("invalid argument")
        return self.gpus[gpu.index]

    def nvmlDeviceGetIndex(self, gpu: Gpu) -> int:
        assert not gpu.is_mig
        return gpu.index

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> bytes:
        return gpu.uuid.encode()

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return "NVIDIA H100" + (" MIG 1g.10gb" if gpu.is_mig else "")

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        size = 10 if gpu.is_mig else 80
        return SimpleNamespace(total=size * GB, free=(size - 4) * GB, used=4 * GB)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, since: int) -> int:
        assert not gpu.is_mig
        return {(1, 0): 2, (0, 0): 90, (1, 1): 91}[kind, since]

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:
        return self.remapped

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> int:
        return self.clock_limits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:
        return self.clock_limits

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[Any]:
        assert fields == [230]
        # Where the field is not supported its value means nothing.
        told = SimpleNamespace(uiVal=abs(self.recovery))
        return [SimpleNamespace(nvmlReturn=3 if self.recovery < 0 else 0, value=told)]

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        return SimpleNamespace(gpu=100, memory=12)

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        assert not gpu.is_mig
        return 71_500

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(busId=b"00000000:3B:00.0" if gpu.index == 0 else b"00000000:5E:00.0")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.10"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080


def look(nvml: Nvml, local_rank: int = 0, visible: str | None = None, logs: tuple[str, ...] = ()) -> GpuFacts | None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    state = gpu_state(local_rank, own_pids={PEER}, nvml=nvml, environment=environment, kernel_logs=logs)
    assert nvml.open == 0
    return state.gpu if state is not None else None


def seen(nvml: Nvml, **options: Any) -> GpuFacts:
    facts = look(nvml, **options)
    assert facts is not None
    return facts


WHOLE = GpuFacts(
    index=0,
    name="NVIDIA H100",
    uuid="GPU-aaaa-1",
    total_bytes=80 * GB,
    free_bytes=76 * GB,
    ecc_errors=2,
    pending_repair=False,
    driver="570.86.10",
    cuda="12.8",
)


def test_all_facts_are_read() -> None:
    assert look(Nvml()) == WHOLE


@pytest.mark.parametrize(
    ("visible", "local_rank", "uuid"),
    [
        (None, 1, "GPU-bbbb-2"),
        (None, 2, None),
        ("1,0", 0, "GPU-bbbb-2"),
        ("1,0", 1, "GPU-aaaa-1"),
        ("1", 3, "GPU-bbbb-2"),
        ("1,0", 2, None),
        ("", 0, None),
        ("-1", 0, None),
        ("NoDevFiles", 0, None),
        ("0,-1,1", 1, "GPU-aaaa-1"),
        (" GPU-bbbb-2 , 0", 0, "GPU-bbbb-2"),
        ("GPU-bb", 0, "GPU-bbbb-2"),
        ("GPU-zz", 0, None),
        ("MIG-cccc-3", 0, "MIG-cccc-3"),
        ("7", 0, None),
    ],
)
def test_the_gpu_of_a_rank_is_selected(visible: str | None, local_rank: int, uuid: str | None) -> None:
    facts = look(Nvml(), local_rank, visible)
    assert (facts and facts.uuid) == uuid


def test_a_mig_instance_has_its_own_memory_and_the_gpus_health() -> None:
    facts = seen(Nvml(), visible="MIG-cccc-3")
    assert (facts.index, facts.total_bytes, facts.ecc_errors) == (1, 10 * GB, 2)
    assert facts.name == "NVIDIA H100 MIG 1g.10gb"


def test_only_unrelated_processes_are_foreign() -> None:
    nvml = Nvml()
    stranger = psutil.Process(os.getppid())
    nvml.processes.append((stranger.pid, 12_300_000_000))
    assert seen(nvml).foreign_processes == (f"pid {stranger.pid} ({stranger.name()}), 12.3 GB",)


def test_a_process_with_unknown_memory_is_still_listed() -> None:
    nvml = Nvml()
    stranger = psutil.Process(os.getppid())
    nvml.processes = [(stranger.pid, None)]  # type: ignore[list-item]
    assert seen(nvml).foreign_processes == (f"pid {stranger.pid} ({stranger.name()})",)


def test_in_a_container_a_lone_unknown_process_may_be_ours() -> None:
    nvml = Nvml()
    nvml.processes = [(HIDDEN, GB)]
    assert seen(nvml).foreign_processes == ()
    nvml.processes = [(HIDDEN, GB), (os.getpid(), GB)]
    assert seen(nvml).foreign_processes == (f"pid {HIDDEN} (not visible from here), 1.0 GB",)


@pytest.mark.parametrize(("remapped", "pending"), [((9, 9, 0, 0), False), ((0, 0, 1, 0), True), ((0, 0, 0, 1), True)])
def test_pending_row_remaps_are_found(remapped: tuple[int, int, int, int], pending: bool) -> None:
    nvml = Nvml()
    nvml.remapped = remapped
    assert seen(nvml).pending_repair is pending


@pytest.mark.parametrize(
    ("bits", "names"),
    [(0, ()), (0x1, ()), (0x2, ()), (0x100, ()), (0x3 | 0x40 | 0x80, ("thermal slowdown", "power brake"))],
)
def test_throttling_reasons_exclude_idle_and_settings(bits: int, names: tuple[str, ...]) -> None:
    for refused in ((), ("nvmlDeviceGetCurrentClocksEventReasons",)):
        nvml = Nvml(*refused)
        nvml.clock_limits = bits
        assert seen(nvml).throttled_by == names


@pytest.mark.parametrize(("action", "text"), [(0, ""), (1, "reset"), (2, "reboot"), (3, "drain"), (99, ""), (-1, "")])
def test_the_recovery_action_is_read(action: int, text: str) -> None:
    nvml = Nvml()
    nvml.recovery = action
    assert seen(nvml).recovery_action == text


FUNCTIONS = [name for name in vars(Nvml) if name.startswith("nvml")]
WITHOUT = {
    "nvmlDeviceGetIndex": {},  # the local rank is taken
    "nvmlDeviceGetUUID": {"uuid": ""},
    "nvmlDeviceGetName": {"name": ""},
    "nvmlDeviceGetMemoryInfo": {"total_bytes": None, "free_bytes": None},
    "nvmlDeviceGetTotalEccErrors": {"ecc_errors": None},
    "nvmlDeviceGetRemappedRows": {"pending_repair": None},
    "nvmlSystemGetDriverVersion": {"driver": ""},
    "nvmlSystemGetCudaDriverVersion": {"cuda": ""},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_refused_function_loses_only_its_own_fact(name: str) -> None:
    nvml = Nvml(name)
    state = gpu_state(0, own_pids={PEER}, nvml=nvml, environment={}, kernel_logs=())
    if name in ("nvmlInit", "nvmlDeviceGetHandleByIndex"):
        assert state is None
    else:
        assert state is not None and state.gpu == replace(WHOLE, **WITHOUT.get(name, {}))


def test_only_the_handle_is_required() -> None:
    nvml = Nvml(*(set(FUNCTIONS) - {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex"}))
    assert look(nvml, 1) == GpuFacts(index=1)


def test_without_a_driver_or_binding_there_are_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert gpu_facts(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_facts(0) is None


LOG = """\
6,1201,900,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.10
4,1202,901,-;NVRM: Xid (PCI:0000:3b:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked
4,1203,902,-;NVRM: Xid (PCI:0000:5e:00): 48, pid=1, DBE (double bit error)
4,1204,903,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, Ch 00000008, MMU Fault
4,1205,904,-;NVRM: Xid (0000:3b:00): 79, GPU has fallen off the bus.
4,1206,905,-;NVRM: Xid (PCI:0000:3b:00): 63, again
4,1207,906,-;NVRM: Xid (PCI:0000:3b:00): 4711, what nobody knows
6,1208,907,-;eth0: Xid (PCI:0000:3b:00): 74
"""


@pytest.fixture
def log(tmp_path: Path) -> str:
    (tmp_path / "dmesg").write_text(LOG)
    return str(tmp_path / "dmesg")


def test_hardware_xids_of_this_gpu_are_listed_once_newest_last(log: str) -> None:
    assert seen(Nvml(), logs=(log,)).xids == ("79 (fallen off the bus)", "63 (row remapping recorded)", "4711")
    assert seen(Nvml(), local_rank=1, logs=(log,)).xids == ("48 (double-bit ECC error)",)


def test_without_a_bus_id_no_xid_matches(log: str) -> None:
    assert seen(Nvml("nvmlDeviceGetPciInfo"), logs=(log,)).xids == ()


def test_the_first_readable_log_counts(log: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert xids("00000000:5E:00.0", (str(tmp_path / "none"), str(tmp_path), log)) != ()
    assert xids("00000000:5E:00.0", (str(tmp_path / "empty"), log)) == ()
    assert xids("00000000:5E:00.0", (str(tmp_path / "none"),)) == ()


def test_at_most_eight_newest_xids_are_kept(tmp_path: Path) -> None:
    lines = [f"NVRM: Xid (PCI:0000:3b:00): {number}, x\n" for number in range(200, 220)]
    (tmp_path / "log").write_text("".join(lines))
    assert xids("00000000:3B:00.0", (str(tmp_path / "log"),)) == tuple(str(number) for number in range(212, 220))


def test_reading_a_log_without_an_end_does_not_block(tmp_path: Path) -> None:
    """Like /dev/kmsg, a pipe with a writer returns EAGAIN instead of an end."""
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    both = os.open(pipe, os.O_RDWR)
    try:
        os.write(both, LOG.encode())
        assert xids("00000000:5E:00.0", (str(pipe),)) == ("48 (double-bit ECC error)",)
    finally:
        os.close(both)


def test_overwritten_log_records_are_skipped(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, told = os.read, []

    def torn(file: int, size: int) -> bytes:
        told.append(size)
        if len(told) == 1:
            raise BrokenPipeError
        return read(file, size)

    monkeypatch.setattr(os, "read", torn)
    assert xids("00000000:5E:00.0", (log,)) == ("48 (double-bit ECC error)",)


def test_the_current_gpu_state_is_read() -> None:
    nvml = Nvml()
    state = gpu_state(1, own_pids={PEER}, nvml=nvml, environment={}, kernel_logs=())
    assert state is not None and state.gpu is not None
    assert (state.utilization, state.power_w, state.no_answer_s) == (1.0, 71.5, 0.0)
    assert state.gpu == look(nvml, 1)
    assert nvml.open == 0


def test_unsupported_gpu_state_is_unknown() -> None:
    nvml = Nvml("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage")
    state = gpu_state(0, nvml=nvml, environment={}, kernel_logs=())
    assert state is not None and state.gpu is not None
    assert (state.utilization, state.power_w) == (None, None)
    assert gpu_state(0, nvml=Nvml("nvmlInit"), environment={}) is None


def test_a_gpu_is_queried_each_time() -> None:
    states = [GpuStateFacts(power_w=70.0), GpuStateFacts(power_w=80.0)]
    watch = GpuWatch(lambda: states.pop(0))
    assert watch.read(AMPLE_S) is None
    found = []
    for _ in range(2):
        watch.begin()
        found.append(watch.read(AMPLE_S))
    assert [state.power_w for state in found if state] == [70.0, 80.0]


def test_an_unresponsive_driver_is_reported_and_not_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    release, asked = threading.Event(), []
    watch = GpuWatch(lambda: asked.append(1) or (release.wait(AMPLE_S) and None))
    watch.begin()
    began_s = watch._question.began_s
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 4.0)
    watch.begin()
    try:
        assert watch.read(0.0) == GpuStateFacts(no_answer_s=4.0)
    finally:
        release.set()
    assert watch.read(AMPLE_S) is None
    assert asked == [1]


def test_a_failing_driver_gives_no_state() -> None:
    def fail() -> GpuStateFacts:
        raise OSError("no driver")

    watch = GpuWatch(fail)
    watch.begin()
    assert watch.read(AMPLE_S) is None
