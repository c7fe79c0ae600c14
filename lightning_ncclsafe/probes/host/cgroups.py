"""Limits of control groups for this process: processor time and memory; and how often they throttled it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_ncclsafe.probes.absent import file_text, or_none

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# cgroup v1 writes "no limit" as the largest page-aligned signed number.
_UNLIMITED_BYTES = 1 << 60
# The inode of the root of a hierarchy; in a container, another group of the hierarchy appears as root.
_ROOT_INODE = 1


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One control group.

    Attributes:
        path: Its path as this process sees it, ``"/jobs/run-7"``. If that starts at the root of a container, the inode
            of this root is added (``"/jobs/run-7@4711"``): other containers have groups with the same path.
    """

    folder: Path
    path: str


@dataclass(frozen=True, slots=True)
class _Mount:
    """The mount of a hierarchy, with the group that appears there as root; without controllers, it is cgroup v2."""

    folder: Path
    root: PurePosixPath
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Quota:
    """Processor time that a control group allows, in units of cores; more cores may run for less of the time."""

    group: str
    cores: float


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that a control group allows.

    Attributes:
        limit_bytes: Its limit, which may be ``memory.high``: above that, the kernel throttles its processes heavily.
        used_bytes: Its use, without page cache that the kernel can reclaim at once; None if not reported.
    """

    group: str
    limit_bytes: int
    used_bytes: int | None

    @property
    def left_bytes(self) -> int:
        """Bytes that may still be allocated."""
        return max(self.limit_bytes - (self.used_bytes or 0), 0)


@dataclass(frozen=True, slots=True)
class Throttling:
    """How quotas have throttled this process's groups since the groups were made.

    Attributes:
        periods: Periods of the quota (mostly 100 ms) in which a group ran.
        throttled_periods: Periods in which the quota was used up early.
        throttled_s: Seconds for which processes had to wait, summed over cores.
    """

    periods: int
    throttled_periods: int
    throttled_s: float


class ControlGroups:
    """This process's control groups, v1 or v2. They are looked up once: processes rarely change their group."""

    def __init__(self, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._cpu = own_groups("cpu", cgroups, proc)
        self._memory = own_groups("memory", cgroups, proc)

    def quotas(self) -> list[Quota]:
        """All quotas of this process: of its own group and of those above it, the nearest first."""
        found = ((group, _quota_cores(group.folder)) for group in self._cpu)
        return [Quota(group.path, cores) for group, cores in found if cores is not None]

    def quota(self) -> Quota | None:
        """The smallest quota; of equal ones the uppermost, which most ranks share."""
        return min(reversed(self.quotas()), key=lambda quota: quota.cores, default=None)

    def memory_limits(self) -> list[MemoryLimit]:
        """All memory limits of this process, the nearest first."""
        return [limit for group in self._memory if (limit := _memory_limit(group)) is not None]

    def memory_limit(self) -> MemoryLimit | None:
        """The limit with the least memory left; of equal ones the uppermost."""
        return min(reversed(self.memory_limits()), key=lambda limit: limit.left_bytes, default=None)

    def hard_memory_limit_bytes(self) -> int | None:
        """The smallest limit above which the kernel kills processes; None if there is none."""
        return min((limit for group in self._memory for limit in _hard_limits(group.folder)), default=None)

    def memory_files(self, name: str) -> list[Path]:
        """A file of the memory controller in this process's own group and in each group above it."""
        return [group.folder / name for group in self._memory]

    def throttling(self) -> Throttling | None:
        """The throttling so far; None if no group reports it."""
        tables = [table for group in self._cpu if "nr_periods" in (table := _table(group.folder / "cpu.stat"))]
        if not tables:
            return None
        # v2 counts microseconds, v1 nanoseconds. Each group counts what its own quota did.
        waited_s = [table.get("throttled_usec", 0) / 1e6 + table.get("throttled_time", 0) / 1e9 for table in tables]
        return Throttling(
            periods=max(table["nr_periods"] for table in tables),
            throttled_periods=sum(table.get("nr_throttled", 0) for table in tables),
            throttled_s=sum(waited_s),
        )


def _quota_cores(folder: Path) -> float | None:
    words = file_text(folder / "cpu.max").split()
    quota = _number(words[0] if words else file_text(folder / "cpu.cfs_quota_us"))
    # The kernel's default period, if the file has none.
    period = _number(words[1] if len(words) > 1 else file_text(folder / "cpu.cfs_period_us")) or 100_000
    return quota / period if quota is not None and quota > 0 and period > 0 else None


def _memory_limit(group: ControlGroup) -> MemoryLimit | None:
    soft = _number(file_text(group.folder / "memory.high"))
    limits = [*_hard_limits(group.folder), *([] if soft is None else [soft])]
    return MemoryLimit(group.path, min(limits), _used_bytes(group.folder)) if limits else None


def _hard_limits(folder: Path) -> Iterator[int]:
    """Limits in a group's files; v1's ``hierarchical_memory_limit`` includes groups that a container does not see."""
    above = _table(folder / "memory.stat").get("hierarchical_memory_limit")
    for limit in (*(_number(file_text(folder / name)) for name in ("memory.max", "memory.limit_in_bytes")), above):
        if limit is not None and 0 <= limit < _UNLIMITED_BYTES:
            yield limit


def _used_bytes(folder: Path) -> int | None:
    used = [_number(file_text(folder / name)) for name in ("memory.current", "memory.usage_in_bytes")]
    known = next((number for number in used if number is not None), None)
    table = _table(folder / "memory.stat")
    # v1's figure without "total_" leaves out the groups below, whose use the limit counts.
    inactive = table.get("total_inactive_file", table.get("inactive_file", 0))
    return None if known is None else max(known - inactive, 0)


def _table(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file_text(file).splitlines())
    numbers = {pair[0]: _number(pair[1]) for pair in pairs if len(pair) == 2}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(text: str) -> int | None:
    return or_none(lambda: int(text))


def own_groups(controller: str, cgroups: Path, proc: Path) -> list[ControlGroup]:
    """This process's group and those above it, the nearest first, of each hierarchy that may have the controller.

    Groups that this process cannot see (those above a container's) are not among them; some may not exist.

    Args:
        controller: ``"cpu"`` or ``"memory"``.
    """
    mounts = _mounts(cgroups, proc)
    found: list[ControlGroup] = []
    for controllers, path in _memberships(proc):
        if not controllers or controller in controllers:
            mount = _mount_of(controller if controllers else "", controllers, mounts, cgroups)
            found += _upwards(mount, path)
    return found


def _memberships(proc: Path) -> Iterator[tuple[list[str], PurePosixPath]]:
    """Controllers and path for each hierarchy; none for cgroup v2, and ``name=…`` for a named one of v1."""
    for line in file_text(proc / "self" / "cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield [name for name in parts[1].split(",") if name], PurePosixPath(parts[2] or "/")


def _mounts(cgroups: Path, proc: Path) -> list[_Mount]:
    found = []
    for line in file_text(proc / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        place, kind = left.split(), right.split()
        if (
            len(place) > 4
            and len(kind) > 2
            and kind[0] in ("cgroup", "cgroup2")
            and Path(place[4]).is_relative_to(cgroups)
        ):
            controllers = frozenset(kind[2].split(",") if kind[0] == "cgroup" else ())
            found.append(_Mount(Path(place[4]), PurePosixPath(place[3]), controllers))
    return found


def _mount_of(controller: str, controllers: list[str], mounts: list[_Mount], cgroups: Path) -> _Mount:
    """The mount of a hierarchy in the table of mounts, or else the usual one of systemd and container engines."""
    for mount in mounts:
        if controller in mount.controllers or not (controller or mount.controllers):
            return mount
    places = [controller, ",".join(controllers)] if controller else ["unified"]
    folders = [cgroups / place for place in places if (cgroups / place).is_dir()]
    return _Mount(folders[0] if folders else cgroups, PurePosixPath("/"), frozenset())


def _upwards(mount: _Mount, path: PurePosixPath) -> Iterator[ControlGroup]:
    # In a container with the host's cgroup namespace, the path is the host's, and the mount is one of the groups above.
    if path.is_relative_to(mount.root):
        path = "/" / path.relative_to(mount.root)
    # A group outside of the root that this process sees appears as "/../other".
    path = PurePosixPath("/") if ".." in path.parts else path
    mark = _mark(mount.folder)
    for group in (path, *path.parents):
        yield ControlGroup(mount.folder / str(group).lstrip("/"), f"{group}{mark}")


def _mark(root: Path) -> str:
    inode = or_none(lambda: root.stat().st_ino)
    return "" if inode in (None, _ROOT_INODE) else f"@{inode}"
