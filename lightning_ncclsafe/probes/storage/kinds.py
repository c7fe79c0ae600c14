"""Whether storage is on a network: by the type of a file system, or by what a block device is connected with."""

import re
from pathlib import Path

from lightning_ncclsafe.probes.absent import or_none

BLOCK_DEVICES = Path("/sys/class/block")

_NETWORK_FILESYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2"}
    | {"orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)
_NETWORK_DEVICES = re.compile(r"(drbd|nbd|rbd)\d")
# How the kernel names the parents of a SCSI disk that another machine serves.
_PARENTS = ((re.compile(r"session\d+"), "iscsi"), (re.compile(r"rport-\d.*"), "fibre channel"))
_NETWORK_TRANSPORTS = ("fc", "rdma", "tcp")
_NETWORK_KINDS = frozenset({"drbd", "nbd", "rbd", *(kind for _, kind in _PARENTS)})
# A logical volume on an encrypted partition on a RAID is three deep.
_DEEPEST = 6


def is_network_filesystem(filesystem: str) -> bool:
    """Whether a type of file system (``"nfs4"``) keeps its files elsewhere.

    Those in user space are taken for such: nearly all that training data lie on are (sshfs, gcsfuse, s3fs, goofys).
    """
    return filesystem in _NETWORK_FILESYSTEMS or filesystem.startswith("fuse.")


def is_on_network(kind: str) -> bool:
    """Whether a :func:`device_kind` is one that another machine serves."""
    return kind in _NETWORK_KINDS or kind.startswith("nvme over ")


def device_kind(device: str, block_devices: Path = BLOCK_DEVICES) -> str:
    """What a block device is connected with.

    Args:
        device: Its path (``"/dev/sda2"``) or name.
        block_devices: Where the kernel tells of them.

    Returns:
        ``"nbd"``, ``"rbd"``, ``"drbd"``, ``"iscsi"``, ``"fibre channel"``, ``"nvme over tcp"``, …, also of what lies
        below a mapped device; ``"zram"``; empty for another one, or where the kernel does not tell.
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
    return _by_parents(place) or _by_transport(place) or _by_what_is_below(place, block_devices, depth)


def _by_parents(place: Path) -> str:
    return next((kind for part in place.parts for mark, kind in _PARENTS if mark.fullmatch(part)), "")


def _by_transport(place: Path) -> str:
    """NVMe tells it of the controller, which is the device of the disk, above a partition, or below a subsystem."""
    for folder in (place / "device", place.parent / "device"):
        for file in (folder / "transport", *sorted(folder.glob("nvme*/transport"))):
            transport = (or_none(file.read_text) or "").strip()
            if transport in _NETWORK_TRANSPORTS:
                return f"nvme over {transport}"
    return ""


def _by_what_is_below(place: Path, block_devices: Path, depth: int) -> str:
    below = or_none(lambda: sorted(entry.name for entry in (place / "slaves").iterdir())) or []
    if depth == _DEEPEST:
        return ""
    kinds = [_kind(name, block_devices, depth + 1) for name in below]
    return next((kind for kind in kinds if is_on_network(kind)), "")
