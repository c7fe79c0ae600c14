"""All that one rank finds out, together: every part may fail or hang, and the others are told."""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ncclsafe.facts import DirectoryFacts, GpuFacts, LoadFacts, PreflightFacts
from lightning_ncclsafe.facts.codec import decode, encode
from lightning_ncclsafe.preflight import probe as module
from lightning_ncclsafe.preflight.probe import RecentFacts, open_files, open_files_limit, preflight_facts, run_parts
from lightning_ncclsafe.probes.process import environment

GPU = GpuFacts(index=3, driver="570.86.10", cuda="12.8")


def look(tmp_path: Path, **options: Any) -> PreflightFacts:
    settings: dict[str, Any] = {"load": LoadFacts(), "local_rank": 0, "is_cuda": False, "deadline_s": 10.0} | options
    return preflight_facts(directories={"logs": str(tmp_path), "data": "s3://data"}, **settings)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Lets threads that hang go once the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_facts_of_this_host_are_complete(tmp_path: Path) -> None:
    load = LoadFacts(loader_workers=4)
    facts = look(tmp_path, load=load)
    assert facts.missing == () and facts.load == load and not facts.is_cuda and facts.gpu is None
    assert facts.capacity.machine and facts.swap.devices is not None and facts.network.chosen_by
    assert [(one.role, bool(one.problem)) for one in facts.directories] == [("logs", False), ("data", True)]
    assert facts.open_files_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.open_files is not None and 3 <= facts.open_files <= facts.open_files_limit
    assert {"python", "torch", "lightning"} <= set(facts.versions)
    assert (facts.clock_offset_s, facts.clock_error_s) == (None, None)
    assert 0.1 <= facts.took_s < 60
    assert decode(PreflightFacts, encode(facts)) == facts


def test_the_gpu_is_queried_only_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "gpu_facts", lambda place: asked.append(place) or GPU)
    facts = look(tmp_path, is_cuda=True, local_rank=1)
    look(tmp_path, is_cuda=True, local_rank=1, gpu_index=5)
    look(tmp_path, is_cuda=False)
    assert asked == [1, 5]
    assert facts.gpu == GPU and facts.is_cuda
    assert (facts.versions["driver"], facts.versions["CUDA of the driver"]) == ("570.86.10", "12.8")


PARTS = {
    "capacity": "capacity",
    "try_directories": "directories",
    "network_facts": "network",
    "versions_seen": "versions",
    "settings_seen": "settings",
    "open_files_limit": "open_files_limit",
    "open_files": "open_files",
    "gpu_facts": "gpu",
    "SwapProbe": "swap",
}


def test_each_part_may_fail_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise psutil.AccessDenied(4711)

    for function, part in PARTS.items():
        with monkeypatch.context() as patched:
            patched.setattr(module, "_WATCHED_S", 0.0)
            patched.setattr(module, "gpu_facts", lambda place: GPU)
            patched.setattr(module, "try_directories", lambda *_: (DirectoryFacts(role="logs", path="/"),))
            patched.setattr(module, function, refuse)
            facts = look(tmp_path, is_cuda=True)
        assert [text.partition(":")[0] for text in facts.missing] == [part]
        assert "AccessDenied" in facts.missing[0] and "4711" in facts.missing[0]
        told = {part for part in PARTS.values() if getattr(facts, part) != getattr(PreflightFacts(), part)}
        # Nothing that matters is set here.
        assert told | {"settings"} == (set(PARTS.values()) | {"settings"}) - ({part} - {"versions", "settings"})


def test_a_hanging_part_is_named_and_the_others_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    monkeypatch.setattr(module, "network_facts", lambda is_cuda: released.wait())
    monkeypatch.setattr(module, "_ENDING_S", 0.1)
    begin = time.monotonic()
    facts = look(tmp_path, deadline_s=0.9)
    assert time.monotonic() - begin < 60
    assert facts.missing == ("network: no answer within 1 s",)
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "ncclsafe-preflight-network"] == [True]
    assert facts.network == PreflightFacts().network and facts.capacity.machine and facts.directories


def test_a_host_that_refuses_everything_is_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    for name in ("virtual_memory", "swap_memory", "net_if_addrs", "net_if_stats", "disk_partitions", "Process"):
        monkeypatch.setattr(psutil, name, refuse)
    facts = look(tmp_path)
    assert facts.missing == ()
    assert facts.capacity.memory_total_bytes is None and facts.swap.total_bytes is None
    assert facts.directories[0].append_s and facts.directories[0].filesystem == ""
    assert facts.open_files is not None and facts.open_files > 0


def test_parts_run_concurrently_and_are_returned_in_order(released: threading.Event) -> None:
    """Each part waits for the other."""
    together = threading.Barrier(2, timeout=10)
    found, missing = run_parts({"a": together.wait, "b": together.wait, "c": lambda: None, "d": lambda: 1 / 0}, 10)
    assert sorted(found) == ["a", "b"]
    assert missing == ["d: ZeroDivisionError: division by zero"]


def test_unlimited_open_files_give_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert open_files_limit() is None


def test_open_files_are_counted_with_and_without_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    file = os.open(os.devnull, os.O_RDONLY)
    try:
        assert open_files() == before + 1
        monkeypatch.delattr(psutil.Process, "num_fds")
        assert open_files() == before + 1
    finally:
        os.close(file)


def test_only_relevant_settings_are_collected() -> None:
    matter = {
        "NCCL_DEBUG": "INFO",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "x",
        "PL_GLOBAL_SEED": "7",
    }
    others = {
        "PATH": "/bin",
        "CUDA_HOME": "/cuda",
        "MY_NCCL_DEBUG": "1",
        "MY_OMP_NUM_THREADS": "1",
        "WANDB_API_KEY": "x",
        "APPL_X": "1",
    }
    seen = environment.settings_seen(others | matter)
    assert seen == matter and list(seen) == sorted(matter)


def test_long_values_are_truncated() -> None:
    assert environment.settings_seen({"NCCL_X": "a" * 500}) == {"NCCL_X": "a" * 200}


def test_package_versions_match_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU builds come without the NCCL and CUDA packages; torch's version is the same."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    by_packages = environment.versions_seen()
    monkeypatch.undo()
    import torch

    assert by_packages["torch"] == torch.__version__
    assert by_packages.items() >= {key: environment.versions_seen()[key] for key in ("python", "lightning")}.items()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(
        environment, "version", {"nvidia-nccl-cu12": "2.27.3", "nvidia-cuda-runtime-cu12": "12.8.90"}.__getitem__
    )
    monkeypatch.setattr(environment, "distribution", {}.__getitem__)
    versions = environment.versions_seen()
    assert (versions.pop("nccl"), versions.pop("cuda"), list(versions)) == ("2.27.3", "12.8", ["python"])


def test_the_probe_imports_neither_torch_nor_lightning() -> None:
    text = (
        "import sys\nfrom lightning_ncclsafe.preflight.probe import preflight_facts, LoadFacts\n"
        "preflight_facts(directories={}, load=LoadFacts(), local_rank=0, is_cuda=True)\n"
        "print(*[name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"


def test_settings_come_from_the_given_environment(tmp_path: Path) -> None:
    found = look(tmp_path, environment={"NCCL_DEBUG": "INFO", "HOME": "/root"})
    assert found.settings == {"NCCL_DEBUG": "INFO"}


FOUND = PreflightFacts(open_files_limit=1024)
LATE = PreflightFacts(missing=("swap: no answer within 2 s",))
FULL = PreflightFacts(directories=(DirectoryFacts(role="logs", path="/logs", problem="No space left on device"),))
CALL: dict[str, Any] = {"directories": {"logs": "/logs"}, "load": LoadFacts(), "environment": {}}


@pytest.mark.parametrize(
    ("found", "after_s", "changed", "looks"),
    [
        (FOUND, 1.0, {}, 1),
        (FOUND, 1.0, {"load": LoadFacts(loader_workers=3)}, 1),
        (FOUND, 1.0, {"directories": {"logs": "/other"}}, 2),
        (FOUND, 1.0, {"environment": {"NCCL_SOCKET_IFNAME": "eth1"}}, 2),
        (FOUND, 1.0, {"environment": {"HOME": "/other"}}, 1),
        (FOUND, 3_600.0, {}, 2),
        (LATE, 1.0, {}, 2),
        (FULL, 1.0, {}, 2),
    ],
)
def test_the_next_trainer_call_reuses_recent_facts(
    monkeypatch: pytest.MonkeyPatch, found: PreflightFacts, after_s: float, changed: dict[str, Any], looks: int
) -> None:
    now, asked = [0.0], list[Any]()
    monkeypatch.setattr(module, "preflight_facts", lambda load, **_: asked.append(load) or replace(found, load=load))
    recent = RecentFacts(clock=lambda: now[0])
    recent.get(**CALL)
    now[0] += after_s
    assert recent.get(**{**CALL, **changed}).load == (CALL | changed)["load"]
    assert len(asked) == looks
