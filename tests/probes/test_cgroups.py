"""Control groups from constructed trees: v1, v2, both, nested, in containers, and torn files; and the host's probe."""

import os
from pathlib import Path

import pytest

from lightning_ncclsafe.probes.host.cgroups import ControlGroups, MemoryLimit, Quota, Throttling
from lightning_ncclsafe.probes.host.resources import HostProbe

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


class Tree:
    """A control group's file system and a /proc, written out by hand."""

    def __init__(self, folder: Path, own: str) -> None:
        self.cgroups, self.proc = folder / "cgroup", folder / "proc"
        self.cgroups.mkdir()
        self.write(self.proc / "self" / "cgroup", own)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, **files: str) -> None:
        """``cpu__max="…"`` writes cpu.max."""
        for name, text in files.items():
            self.write(self.cgroups / path / name.replace("__", "."), f"{text}\n")

    def mounted(self, folder: str, root: str, kind: str, options: str = "rw") -> None:
        line = f"33 28 0:29 {root} {self.cgroups / folder} rw,nosuid shared:9 - {kind} cgroup {options}\n"
        file = self.proc / "self" / "mountinfo"
        self.write(file, (file.read_text() if file.exists() else "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n") + line)

    def groups(self) -> ControlGroups:
        return ControlGroups(self.cgroups, self.proc)

    def probe(self) -> HostProbe:
        return HostProbe(self.cgroups, self.proc)

    def quota(self) -> tuple[float, str] | None:
        quota = self.groups().quota()
        return (quota.cores, quota.group.partition("@")[0]) if quota else None

    def memory(self) -> tuple[int, int | None, str] | None:
        limit = self.groups().memory_limit()
        return (limit.limit_bytes, limit.used_bytes, limit.group.partition("@")[0]) if limit else None


@pytest.fixture
def v2(tmp_path: Path) -> Tree:
    return Tree(tmp_path, "0::/slurm/job_7/step_0\n")


@pytest.fixture
def v1(tmp_path: Path) -> Tree:
    return Tree(tmp_path, "12:cpuset:/\n4:cpu,cpuacct:/slurm/job_7\n5:memory:/slurm/job_7\n1:name=systemd:/user\n")


def test_v2_the_quota_of_the_own_group_is_read(v2: Tree) -> None:
    v2.group("slurm/job_7/step_0", cpu__max="400000 100000")
    v2.group("slurm/job_8", cpu__max="100000 100000")
    assert v2.quota() == (4.0, "/slurm/job_7/step_0")


def test_v2_a_tighter_quota_above_applies_and_is_named(v2: Tree) -> None:
    v2.group("slurm/job_7/step_0", cpu__max="400000 100000")
    v2.group("slurm/job_7", cpu__max="max 100000")
    v2.group("slurm", cpu__max="150000 100000")
    assert v2.quota() == (1.5, "/slurm")


def test_quotas_are_listed_nearest_first(v2: Tree) -> None:
    v2.group("slurm/job_7/step_0", cpu__max="200000 100000")
    v2.group("slurm", cpu__max="800000 100000")
    mark = f"@{os.stat(v2.cgroups).st_ino}"
    assert v2.groups().quotas() == [Quota(f"/slurm/job_7/step_0{mark}", 2.0), Quota(f"/slurm{mark}", 8.0)]


def test_the_uppermost_of_equal_quotas_is_shared(v2: Tree) -> None:
    for group in ("slurm/job_7/step_0", "slurm/job_7", "slurm"):
        v2.group(group, cpu__max="200000 100000")
    assert v2.quota() == (2.0, "/slurm")


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", None),
        ("max", None),
        ("50000 100000", 0.5),
        ("33000 10000", 3.3),
        ("250000", 2.5),
        ("", None),
        ("100000 0", 1.0),
        ("-5 100000", None),
        ("0 100000", None),
        ("many of them", None),
        ("200000 tor", 2.0),
    ],
)
def test_v2_quota_files_are_parsed(v2: Tree, text: str, cores: float | None) -> None:
    v2.group("slurm/job_7", cpu__max=text)
    quota = v2.quota()
    assert (quota and quota[0]) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("-1", "100000", None), ("150000", "100000", 1.5), ("20000", "10000", 2.0), ("x", "100000", None)],
)
def test_v1_quotas_are_parsed(v1: Tree, quota: str, period: str, cores: float | None) -> None:
    v1.group("cpu,cpuacct/slurm/job_7", cpu__cfs_quota_us=quota, cpu__cfs_period_us=period)
    v1.group("cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert v1.quota() == (None if cores is None else (cores, "/slurm/job_7"))


def test_v1_co_mounted_controllers_are_found_by_either_name(v1: Tree) -> None:
    v1.group("cpu/slurm", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert v1.quota() == (3.0, "/slurm")


def test_v1_the_mount_table_gives_the_mount_point(v1: Tree) -> None:
    v1.mounted("both", "/", "cgroup", "rw,cpuacct,cpu")
    v1.group("both/slurm/job_7", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    v1.group("cpu/slurm/job_7", cpu__cfs_quota_us="900000", cpu__cfs_period_us="100000")
    assert v1.quota() == (1.0, "/slurm/job_7")


def test_a_named_hierarchy_and_other_controllers_limit_nothing(v1: Tree) -> None:
    v1.group("cpuset", cpu__max="100000 100000", memory__max="1")
    v1.group("user", cpu__max="100000 100000", memory__max="1")
    v1.group("name=systemd/user", cpu__max="100000 100000", memory__max="1")
    assert (v1.quota(), v1.memory()) == (None, None)


def test_hybrid_memory_is_v1_and_processor_time_v2(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "5:memory:/a\n1:name=systemd:/b\n0::/c/d\n")
    tree.group("memory/a", memory__limit_in_bytes=str(2 * GIB), memory__usage_in_bytes=str(GIB))
    tree.group("unified/c", cpu__max="700000 100000")
    assert tree.quota() == (7.0, "/c")
    assert tree.memory() == (2 * GIB, GIB, "/a")


def test_hybrid_is_found_by_the_mount_table(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "5:memory:/a\n0::/c\n")
    tree.mounted("memory", "/", "cgroup", "rw,memory")
    tree.mounted("two", "/", "cgroup2")
    tree.group("two/c", cpu__max="700000 100000")
    tree.group("c", cpu__max="100000 100000")
    assert tree.quota() == (7.0, "/c")


def test_in_a_container_with_host_paths_the_root_is_the_own_group(v1: Tree) -> None:
    v1.group("memory", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes="5000")
    v1.group("cpu", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert v1.memory() == (GIB, 5000, "/")
    assert v1.quota() == (0.5, "/")


def test_in_a_container_a_subgroup_of_the_mount_is_found(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/docker/4f/workers\n")
    tree.mounted("", "/docker/4f", "cgroup2")
    tree.group("workers", cpu__max="100000 100000")
    tree.group("", cpu__max="400000 100000")
    assert tree.quota() == (1.0, "/workers")


def test_a_group_outside_the_namespace_falls_back_to_the_root(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/../other\n")
    tree.group("", cpu__max="400000 100000")
    tree.write(tmp_path / "other" / "cpu.max", "100000 100000")
    assert tree.quota() == (4.0, "/")


def test_groups_of_two_containers_have_different_names(tmp_path: Path) -> None:
    """Both containers see their own group as the root."""
    names = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tree = Tree(tmp_path / name, "0::/\n")
        tree.group("", cpu__max="400000 100000")
        quota = tree.groups().quota()
        assert quota is not None
        names.append(quota.group)
    assert len(set(names)) == 2


def test_memory_counts_the_least_left_and_not_the_lowest_limit(v2: Tree) -> None:
    v2.group("slurm/job_7/step_0", memory__max=str(2 * GIB), memory__current="1000")
    v2.group("slurm", memory__max=str(8 * GIB), memory__current=str(7 * GIB))
    assert v2.memory() == (8 * GIB, 7 * GIB, "/slurm")
    left = [limit.left_bytes for limit in v2.groups().memory_limits()]
    assert left == [2 * GIB - 1000, GIB]
    assert v2.groups().hard_memory_limit_bytes() == 2 * GIB


def test_reclaimable_page_cache_does_not_count_as_used(v2: Tree) -> None:
    stat = "anon 100\nfile 900\ninactive_file 600\nactive_file 300"
    v2.group("slurm", memory__max="5000", memory__current="1000", memory__stat=stat)
    assert v2.memory() == (5000, 400, "/slurm")


def test_v1_the_page_cache_of_subgroups_counts_too(v1: Tree) -> None:
    v1.group(
        "memory/slurm/job_7",
        memory__limit_in_bytes="5000",
        memory__usage_in_bytes="1000",
        memory__stat="inactive_file 10\ntotal_inactive_file 600",
    )
    assert v1.memory() == (5000, 400, "/slurm/job_7")


def test_v1_a_limit_outside_the_container_is_known(v1: Tree) -> None:
    v1.group(
        "memory/slurm/job_7",
        memory__limit_in_bytes=str(V1_UNLIMITED),
        memory__usage_in_bytes="1000",
        memory__stat=f"hierarchical_memory_limit {3 * GIB}",
    )
    assert v1.memory() == (3 * GIB, 1000, "/slurm/job_7")


def test_memory_high_counts_as_the_limit(v2: Tree) -> None:
    v2.group("slurm", memory__max="5000", memory__high="3000", memory__current="1000")
    assert v2.memory() == (3000, 1000, "/slurm")
    assert v2.groups().hard_memory_limit_bytes() == 5000


def test_unlimited_means_no_limit(v1: Tree, tmp_path: Path) -> None:
    v1.group("memory", memory__limit_in_bytes=str(V1_UNLIMITED), memory__usage_in_bytes="5")
    v1.group("memory/slurm", memory__max="max", memory__high="max")
    assert v1.memory() is None


def test_more_used_than_allowed_leaves_nothing() -> None:
    assert MemoryLimit("/", 100, 130).left_bytes == 0
    assert MemoryLimit("/", 100, None).left_bytes == 100


def test_v2_throttling_adds_up_over_the_groups(v2: Tree) -> None:
    v2.group("slurm/job_7", cpu__stat="usage_usec 9\nnr_periods 40\nnr_throttled 3\nthrottled_usec 2500000")
    v2.group("slurm", cpu__stat="usage_usec 9\nnr_periods 90\nnr_throttled 4\nthrottled_usec 500000")
    v2.group("", cpu__stat="usage_usec 9")
    assert v2.groups().throttling() == Throttling(periods=90, throttled_periods=7, throttled_s=3.0)


def test_v1_throttling_is_in_nanoseconds(v1: Tree) -> None:
    v1.group("cpu,cpuacct/slurm", cpu__stat="nr_periods 10\nnr_throttled 2\nthrottled_time 1500000000")
    assert v1.groups().throttling() == Throttling(periods=10, throttled_periods=2, throttled_s=1.5)


@pytest.mark.parametrize("own", ["", "0::", "garbage", "4:cpu\n::\n", "\x00\xff:::\n", "0::/" + "x/" * 400])
def test_a_torn_table_of_groups_raises_nothing(tmp_path: Path, own: str) -> None:
    tree = Tree(tmp_path, own)
    tree.write(tree.proc / "self" / "mountinfo", "33 28\n - cgroup\n- - -\n1 2 3 4 /x - cgroup2 c\n")
    groups = tree.groups()
    assert (groups.quota(), groups.memory_limit(), groups.throttling()) == (None, None, None)


def test_torn_files_give_no_limits(v2: Tree) -> None:
    v2.group(
        "slurm", cpu__max="\x00", memory__max="12 34", memory__current="?", memory__stat="a\nb c d\ninactive_file x"
    )
    v2.write(v2.cgroups / "slurm" / "cpu.stat", "nr_periods\nnr_throttled 3 4\n")
    (v2.cgroups / "slurm" / "memory.high").write_bytes(b"\xff\xfe")
    groups = v2.groups()
    assert (groups.quota(), groups.memory_limit(), groups.throttling()) == (None, None, None)


def test_a_folder_in_place_of_a_file_gives_no_limit(v2: Tree) -> None:
    (v2.cgroups / "slurm" / "memory.max").mkdir(parents=True)
    assert v2.memory() is None


def test_without_control_groups_nothing_is_known(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path / "none", tmp_path / "neither")
    assert (groups.quotas(), groups.memory_limits(), groups.memory_files("memory.events")) == ([], [], [])
    assert groups.hard_memory_limit_bytes() is None and groups.throttling() is None


V2 = "0::/jobs/run-7\n"
V1 = "12:cpu,cpuacct:/cpu\n5:memory,hugetlb:/jobs/run-7\n1:name=systemd:/other\n"


@pytest.mark.parametrize(
    ("own", "limits", "limit_bytes"),
    [
        (V2, {"jobs/run-7": 4 * GIB, "jobs/run-8": GIB}, 4 * GIB),
        (V2, {"jobs/run-7": 4 * GIB, "jobs": 2 * GIB, "": "max"}, 2 * GIB),
        (V2, {"jobs/run-7": "max", "jobs": "max"}, None),
        (V2, {"jobs/run-7": ""}, None),
        (V2, {"jobs/run-7": "lots"}, None),
        (V2, {"jobs/run-7": "-"}, None),
        (V1, {"memory/jobs/run-7": 3 * GIB, "cpu": GIB, "other": GIB, "memory": V1_UNLIMITED}, 3 * GIB),
        # In a container, the path is the host's, but what is mounted is the container's own group.
        (V1, {"memory": GIB}, GIB),
        (V1, {"memory/jobs/run-7": V1_UNLIMITED}, None),
    ],
)
def test_the_memory_limit_is_the_kernels_kill_limit(
    tmp_path: Path, own: str, limits: dict[str, object], limit_bytes: int | None
) -> None:
    tree = Tree(tmp_path, own)
    for group, limit in limits.items():
        tree.write(tree.cgroups / group / ("memory.max" if own == V2 else "memory.limit_in_bytes"), f"{limit}\n")
    assert tree.probe().read().memory_limit_bytes == limit_bytes


def test_without_control_groups_there_is_no_limit_and_no_counter(tmp_path: Path) -> None:
    facts = HostProbe(tmp_path / "none", tmp_path / "neither").read()
    assert (facts.memory_limit_bytes, facts.oom_kills) == (None, None)
    assert facts.rss_bytes is not None


def events(kills: int) -> str:
    return f"low 0\nhigh 2\nmax 19\noom 3\noom_kill {kills}\noom_group_kill 50\n"


def test_oom_kills_count_since_the_probe_was_created(v2: Tree) -> None:
    v2.group("slurm/job_7/step_0", memory__events=events(5))
    v2.write(v2.proc / "vmstat", "pgpgin 1\noom_kill 90\n")
    probe = v2.probe()
    assert probe.read().oom_kills == 0
    v2.group("slurm/job_7/step_0", memory__events=events(7))
    assert probe.read().oom_kills == 2


def test_oom_kills_of_the_host_count_without_a_group_counter(v1: Tree) -> None:
    v1.write(v1.proc / "vmstat", "pgpgin 1\noom_kill 4\n")
    probe = v1.probe()
    v1.write(v1.proc / "vmstat", "pgpgin 1\noom_kill 5\n")
    assert probe.read().oom_kills == 1


def test_a_vanished_counter_is_unknown_and_not_negative(v1: Tree) -> None:
    v1.write(v1.proc / "vmstat", "oom_kill 4\n")
    probe = v1.probe()
    (v1.proc / "vmstat").unlink()
    assert probe.read().oom_kills is None
