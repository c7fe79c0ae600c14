"""What control groups allow this process: processor time and memory; how often they have held it up."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.cgroup_folders import Group, own_groups

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# cgroup v1 says "no limit" with the largest page-aligned signed number.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Quota:
    """Processor time that a control group allows, in cores' worth; more cores may run, for less of the time."""

    group: str
    cores: float


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that a control group allows.

    Attributes:
        group: Path of the group.
        limit_bytes: Its limit; above ``memory.high`` the kernel slows its processes down until they hardly move, so
            that counts too.
        used_bytes: What it uses, without the page cache that the kernel can take back at once; None if it is not told.
    """

    group: str
    limit_bytes: int
    used_bytes: int | None

    @property
    def left_bytes(self) -> int:
        """What may still be allocated."""
        return max(self.limit_bytes - (self.used_bytes or 0), 0)


@dataclass(frozen=True, slots=True)
class Throttling:
    """How a quota has held this process's groups up since they were made.

    Attributes:
        periods: Periods of the quota (mostly 100 ms) in which a group ran.
        throttled_periods: Those in which its quota was used up before they were over.
        throttled_s: Seconds for which its processes had to wait, summed over cores.
    """

    periods: int
    throttled_periods: int
    throttled_s: float


class ControlGroups:
    """This process's control groups, v1 or v2. They are looked up once: processes rarely change their group.

    Args:
        cgroups: Root of the control groups' file system.
        proc: Root of the file system that tells this process's own group.
    """

    def __init__(self, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._cpu = own_groups("cpu", cgroups, proc)
        self._memory = own_groups("memory", cgroups, proc)

    def quotas(self) -> list[Quota]:
        """Each quota that holds for this process: of its own group and of those above it, the nearest first."""
        found = ((group, _quota_cores(group.folder)) for group in self._cpu)
        return [Quota(group.path, cores) for group, cores in found if cores is not None]

    def quota(self) -> Quota | None:
        """The least of them; of equal ones the uppermost, which most ranks share."""
        return min(reversed(self.quotas()), key=lambda quota: quota.cores, default=None)

    def memory_limits(self) -> list[MemoryLimit]:
        """Each memory limit that holds for this process, the nearest first."""
        return [limit for group in self._memory if (limit := _memory_limit(group)) is not None]

    def memory_limit(self) -> MemoryLimit | None:
        """The one with the least left; of equal ones the uppermost."""
        return min(reversed(self.memory_limits()), key=lambda limit: limit.left_bytes, default=None)

    def hard_memory_limit_bytes(self) -> int | None:
        """The least limit above which the kernel kills; None if there is none."""
        return min((limit for group in self._memory for limit in _hard_limits(group.folder)), default=None)

    def memory_files(self, name: str) -> list[Path]:
        """A file of the memory controller in this process's own group and in each group above it."""
        return [group.folder / name for group in self._memory]

    def throttling(self) -> Throttling | None:
        """What the quotas have cost so far; None where no group tells."""
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
    words = _text(folder / "cpu.max").split()
    quota = _number(words[0] if words else _text(folder / "cpu.cfs_quota_us"))
    # The kernel's default period, where the file is cut short.
    period = _number(words[1] if len(words) > 1 else _text(folder / "cpu.cfs_period_us")) or 100_000
    return quota / period if quota is not None and quota > 0 and period > 0 else None


def _memory_limit(group: Group) -> MemoryLimit | None:
    soft = _number(_text(group.folder / "memory.high"))
    limits = [*_hard_limits(group.folder), *([] if soft is None else [soft])]
    return MemoryLimit(group.path, min(limits), _used_bytes(group.folder)) if limits else None


def _hard_limits(folder: Path) -> Iterator[int]:
    """v1's ``hierarchical_memory_limit`` knows also the limits of groups that a container does not see."""
    above = _table(folder / "memory.stat").get("hierarchical_memory_limit")
    for limit in (*(_number(_text(folder / name)) for name in ("memory.max", "memory.limit_in_bytes")), above):
        if limit is not None and 0 <= limit < _UNLIMITED_BYTES:
            yield limit


def _used_bytes(folder: Path) -> int | None:
    used = [_number(_text(folder / name)) for name in ("memory.current", "memory.usage_in_bytes")]
    known = next((number for number in used if number is not None), None)
    table = _table(folder / "memory.stat")
    # v1's figure without "total_" leaves out the groups below, whose use the limit counts.
    inactive = table.get("total_inactive_file", table.get("inactive_file", 0))
    return None if known is None else max(known - inactive, 0)


def _table(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(file).splitlines())
    numbers = {pair[0]: _number(pair[1]) for pair in pairs if len(pair) == 2}
    return {name: number for name, number in numbers.items() if number is not None}


def _number(text: str) -> int | None:
    return or_none(lambda: int(text))


def _text(file: Path) -> str:
    return or_none(lambda: file.read_text(encoding="ascii").strip()) or ""
