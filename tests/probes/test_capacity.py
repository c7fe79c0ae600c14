"""What a rank may use: from constructed groups, from limits of a real process, and where the system tells nothing."""

import os
import resource
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ncclsafe.probes.host import capacity as module
from lightning_ncclsafe.probes.host.capacity import capacity, cpus, process_limit_bytes
from lightning_ncclsafe.probes.host.cgroups import ControlGroups

Stat = namedtuple("Stat", "f_blocks f_bavail f_frsize")
Memory = namedtuple("Memory", "vms data")


def refuse(*_: Any, **__: Any) -> Any:
    raise psutil.AccessDenied


@pytest.fixture
def nowhere(tmp_path: Path) -> ControlGroups:
    return ControlGroups(tmp_path / "none", tmp_path / "neither")


def test_this_host_has_cores_and_memory() -> None:
    facts = capacity()
    assert facts.machine and facts.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert facts.memory_total_bytes and facts.memory_available_bytes
    assert 0 < facts.memory_available_bytes <= facts.memory_total_bytes


def test_parent_groups_are_included(tmp_path: Path) -> None:
    for group, cores, limit, used in (("a/b", "200000", 500, 100), ("a", "300000", 900, 700)):
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{cores} 100000\n")
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/a/b\n")
    facts = capacity(ControlGroups(tmp_path / "cgroup", tmp_path))
    assert (facts.quota_cores, facts.quota_group.partition("@")[0]) == (2.0, "/a/b")
    assert (facts.memory_limit_bytes, facts.memory_used_bytes) == (900, 700)
    assert facts.memory_group.partition("@")[0] == "/a"
    assert list(facts.quotas.values()) == [2.0, 3.0]
    assert list(facts.memory_left_bytes.values()) == [400, 200]
    assert facts.quota_group in facts.quotas and facts.memory_group in facts.memory_left_bytes


def test_shared_memory_counts_what_this_user_can_use(nowhere: ControlGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or Stat(16384, 1000, 4096))
    facts = capacity(nowhere, shm="/shared")
    assert asked == ["/shared"]
    assert (facts.shm_total_bytes, facts.shm_free_bytes) == (64 << 20, 1000 * 4096)


@pytest.mark.parametrize(("text", "cpus_per_task"), [("8", 8), ("", None), ("8(x2)", None), (None, None)])
def test_the_slurm_cpu_count_is_kept_if_numeric(nowhere: ControlGroups, text: str | None, cpus_per_task: int) -> None:
    environment = {} if text is None else {"SLURM_CPUS_PER_TASK": text}
    assert capacity(nowhere, environment=environment).slurm_cpus_per_task == cpus_per_task


def test_the_affinity_mask_gives_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 1, 4})
    assert cpus() == (1, 4, 9)


def test_without_a_mask_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [3, 2])
    assert cpus() == (2, 3)
    monkeypatch.delattr(psutil.Process, "cpu_affinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert cpus() == (0, 1, 2)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpus() == ()


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, None),
        ({"RLIMIT_AS": 1000}, 400),
        ({"RLIMIT_AS": 1000, "RLIMIT_DATA": 300}, 100),
        ({"RLIMIT_DATA": 150}, 0),
    ],
)
def test_the_process_limit_counts_what_is_left(
    limits: dict[str, int], left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {getattr(resource, name): (limit, limit) for name, limit in limits.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda which: told.get(which, (resource.RLIM_INFINITY, -1)))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: Memory(600, 200))
    assert process_limit_bytes() == left


def test_already_open_files_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024 if which == resource.RLIMIT_NOFILE else -1, -1))
    monkeypatch.setattr(psutil.Process, "num_fds", lambda self: 24, raising=False)
    assert capacity().open_files_left == 1000
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert capacity().open_files_left is None


def test_a_host_without_any_information_is_handled(
    nowhere: ControlGroups, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("virtual_memory", "Process"):
        monkeypatch.setattr(psutil, name, refuse)
    for name in ("sched_getaffinity", "statvfs"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(resource, "getrlimit", refuse)
    monkeypatch.setattr(module, "host_boot_id", lambda: "node7")
    assert capacity(nowhere, environment={}) == module.Capacity(machine="node7")
