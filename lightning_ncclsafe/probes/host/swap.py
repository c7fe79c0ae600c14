"""Swap space and its devices; pressure on memory, storage and cores, and what quotas cost, between two looks."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from lightning_ncclsafe.facts import PressureFacts, SwapFacts
from lightning_ncclsafe.probes.absent import file_text, line_after, or_none
from lightning_ncclsafe.probes.host.cgroups import ControlGroups, Throttling
from lightning_ncclsafe.probes.host.resources import filesystem_of

_PROC = Path("/proc")
# A share of a shorter time means nothing.
_SHORTEST_S = 0.01

_RESOURCES = (("cpu", "some"), ("memory", "full"), ("io", "full"))

BLOCK_DEVICES = Path("/sys/class/block")

_NETWORK_FILESYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2"}
    | {"orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)
_NETWORK_DEVICES = re.compile(r"(drbd|nbd|rbd)\d")
# The kernel's names of the parents of a SCSI disk that another machine serves.
_PARENTS = ((re.compile(r"session\d+"), "iscsi"), (re.compile(r"rport-\d.*"), "fibre channel"))
_NETWORK_TRANSPORTS = ("fc", "rdma", "tcp")
_NETWORK_KINDS = frozenset({"drbd", "nbd", "rbd", *(kind for _, kind in _PARENTS)})
# A logical volume on an encrypted partition on a RAID is three deep.
_DEEPEST = 6


class SwapProbe:
    """Watches the host's swap from when it is made to :meth:`read`."""

    def __init__(
        self,
        proc: Path = _PROC,
        block_devices: Path = BLOCK_DEVICES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._block_devices = block_devices
        self._now = now
        self._began_s = now()
        self._swap_before, self._waited_before = or_none(psutil.swap_memory), _waited_us(proc)

    def read(self) -> SwapFacts:
        """Facts since the probe was made; what the host does not report is None."""
        before, swap = self._swap_before, or_none(psutil.swap_memory)
        waited, took_s = _waited_us(self._proc), self._now() - self._began_s
        devices = list(self._devices())
        return SwapFacts(
            total_bytes=swap.total if swap else None,
            used_bytes=swap.used if swap else None,
            swapped_out_bytes=swap.sout - before.sout if swap and before else None,
            swapped_in_bytes=swap.sin - before.sin if swap and before else None,
            devices=tuple(name for name, _ in devices),
            on_network=tuple(name for name, network in devices if network),
            memory_stalled=_share(self._waited_before, waited, "memory", took_s),
            io_stalled=_share(self._waited_before, waited, "io", took_s),
            cpu_waited=_share(self._waited_before, waited, "cpu", took_s),
        )

    def _devices(self) -> Iterator[tuple[str, bool]]:
        """Each swap device or file in words, and whether it is on a network."""
        for line in file_text(self._proc / "swaps").splitlines()[1:]:
            words = line.split()
            if len(words) < 2:
                continue
            path = words[0].replace("\\040", " ")
            if words[1] == "file":
                kind = or_none(partial(filesystem_of, path)) or ""
                network = is_network_filesystem(kind)
            else:
                kind = device_kind(path, self._block_devices)
                network = is_on_network(kind)
            yield f"{path} on {kind}" if kind else path, network


def _waited_us(proc: Path) -> dict[str, int | None]:
    """Microseconds of pressure by resource; None where the kernel does not report it."""
    # "full avg10=0.00 avg60=0.00 avg300=0.00 total=4711"
    lines = {name: line_after(proc / "pressure" / name, f"{kind} ") for name, kind in _RESOURCES}
    return {name: or_none(partial(int, line.rpartition("total=")[2])) for name, line in lines.items()}


def _share(before: Mapping[str, int | None], after: Mapping[str, int | None], name: str, over_s: float) -> float | None:
    earlier, later = before.get(name), after.get(name)
    if earlier is None or later is None or over_s < _SHORTEST_S:
        return None
    # The kernel adds up in steps, so that a short time may get more than its share.
    return round(min(max((later - earlier) / 1e6 / over_s, 0.0), 1.0), 4)


@dataclass(frozen=True, slots=True)
class PressureLook:
    """One look.

    Attributes:
        throttling: What the quotas have cost; None if no group reports it.
        waited_us: Microseconds of pressure by resource: ``"cpu"``, ``"memory"``, ``"io"``; None where not reported.
    """

    throttling: Throttling | None
    waited_us: dict[str, int | None]


def look_at_pressure(groups: ControlGroups, proc: Path = _PROC) -> PressureLook:
    """One look; takes about 0.2 ms."""
    return PressureLook(throttling=or_none(groups.throttling), waited_us=_waited_us(proc))


def pressure_between(before: PressureLook, after: PressureLook, over_s: float) -> PressureFacts:
    """What happened between two looks."""
    earlier, later = before.throttling, after.throttling
    return PressureFacts(
        over_s=round(over_s, 1),
        throttled_s=round(later.throttled_s - earlier.throttled_s, 2) if earlier and later else None,
        periods=later.periods - earlier.periods if earlier and later else None,
        throttled_periods=later.throttled_periods - earlier.throttled_periods if earlier and later else None,
        cpu_waited=_share(before.waited_us, after.waited_us, "cpu", over_s),
        memory_stalled=_share(before.waited_us, after.waited_us, "memory", over_s),
        io_stalled=_share(before.waited_us, after.waited_us, "io", over_s),
    )


def is_network_filesystem(filesystem: str) -> bool:
    """Whether a type of file system (``"nfs4"``) keeps its files elsewhere.

    A file system in user space counts as one: nearly all that hold training data are (sshfs, gcsfuse, s3fs, goofys).
    """
    return filesystem in _NETWORK_FILESYSTEMS or filesystem.startswith("fuse.")


def is_on_network(kind: str) -> bool:
    """Whether a :func:`device_kind` means that another machine serves the device."""
    return kind in _NETWORK_KINDS or kind.startswith("nvme over ")


def device_kind(device: str, block_devices: Path = BLOCK_DEVICES) -> str:
    """How a block device is connected.

    Args:
        device: Its path (``"/dev/sda2"``) or name.

    Returns:
        ``"nbd"``, ``"rbd"``, ``"drbd"``, ``"iscsi"``, ``"fibre channel"``, ``"nvme over tcp"``, …, also for what lies
        below a mapped device; ``"zram"``; empty for any other, or if unknown.
    """
    # /dev/mapper/swap is a link to /dev/dm-3.
    name = (or_none(Path(device).resolve) or Path(device)).name
    return _kind(name, block_devices, 0)


def _kind(name: str, block_devices: Path, depth: int) -> str:
    named = _NETWORK_DEVICES.match(name)
    if named:
        return named[1]
    if name.startswith("zram"):
        return "zram"
    place = or_none((block_devices / name).resolve) or block_devices / name
    by_parents = (kind for part in place.parts for mark, kind in _PARENTS if mark.fullmatch(part))
    return next(by_parents, "") or _by_transport(place) or _by_what_is_below(place, block_devices, depth)


def _by_transport(place: Path) -> str:
    """The transport that NVMe reports for the controller: the disk's device, above a partition or below a subsystem."""
    for folder in (place / "device", place.parent / "device"):
        for file in (folder / "transport", *sorted(folder.glob("nvme*/transport"))):
            transport = file_text(file)
            if transport in _NETWORK_TRANSPORTS:
                return f"nvme over {transport}"
    return ""


def _by_what_is_below(place: Path, block_devices: Path, depth: int) -> str:
    below = or_none(lambda: sorted(entry.name for entry in (place / "slaves").iterdir())) or []
    if depth == _DEEPEST:
        return ""
    kinds = [_kind(name, block_devices, depth + 1) for name in below]
    return next((kind for kind in kinds if is_on_network(kind)), "")
