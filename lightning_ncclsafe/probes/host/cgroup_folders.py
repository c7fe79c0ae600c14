"""Where this process's control groups are: cgroup v1, v2, both at once, and in a container that sees only a part."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_ncclsafe.probes.absent import or_none

# The root of a whole hierarchy has this inode; a container is shown some group in the middle of it as its root.
_ROOT_INODE = 1


@dataclass(frozen=True, slots=True)
class Group:
    """One control group.

    Attributes:
        folder: Where its files are.
        path: Its path as this process sees it, ``"/jobs/run-7"``. Where that starts at the root of a container, the
            inode of this root is added (``"/jobs/run-7@4711"``): other containers have groups of the same path.
    """

    folder: Path
    path: str


@dataclass(frozen=True, slots=True)
class _Mount:
    """Where a hierarchy is mounted, and which of its groups is seen there as root; no controllers: cgroup v2."""

    folder: Path
    root: PurePosixPath
    controllers: frozenset[str]


def own_groups(controller: str, cgroups: Path, proc: Path) -> list[Group]:
    """This process's group and those above it, the nearest first, of each hierarchy that may have the controller.

    Groups that this process cannot see (those above a container's) are not among them; some may not exist.

    Args:
        controller: ``"cpu"`` or ``"memory"``.
        cgroups: Where control groups are mounted.
        proc: Where the kernel tells of this process.
    """
    mounts = _mounts(cgroups, proc)
    found: list[Group] = []
    for controllers, path in _memberships(proc):
        if not controllers or controller in controllers:
            mount = _mount_of(controller if controllers else "", controllers, mounts, cgroups)
            found += _upwards(mount, path)
    return found


def _memberships(proc: Path) -> Iterator[tuple[list[str], PurePosixPath]]:
    """Controllers and path of each hierarchy; that of cgroup v2 has no controllers, a named one of v1 ``name=…``."""
    for line in _lines(proc / "self" / "cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield [name for name in parts[1].split(",") if name], PurePosixPath(parts[2] or "/")


def _mounts(cgroups: Path, proc: Path) -> list[_Mount]:
    found = []
    for line in _lines(proc / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        place, kind = left.split(), right.split()
        if len(place) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2") and _below(place[4], cgroups):
            controllers = frozenset(kind[2].split(",") if kind[0] == "cgroup" else ())
            found.append(_Mount(Path(place[4]), PurePosixPath(place[3]), controllers))
    return found


def _below(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder)


def _mount_of(controller: str, controllers: list[str], mounts: list[_Mount], cgroups: Path) -> _Mount:
    """Where the table of mounts says, or else where systemd and container engines put it."""
    for mount in mounts:
        if controller in mount.controllers or not (controller or mount.controllers):
            return mount
    places = [controller, ",".join(controllers)] if controller else ["unified"]
    folders = [cgroups / place for place in places if (cgroups / place).is_dir()]
    return _Mount(folders[0] if folders else cgroups, PurePosixPath("/"), frozenset())


def _upwards(mount: _Mount, path: PurePosixPath) -> Iterator[Group]:
    # The path is the host's, where the container shares its view: what is mounted is then one of the groups above.
    if path.is_relative_to(mount.root):
        path = "/" / path.relative_to(mount.root)
    # A group that is not below the one this process sees as root is told as "/../other".
    path = PurePosixPath("/") if ".." in path.parts else path
    mark = _mark(mount.folder)
    for group in (path, *path.parents):
        yield Group(mount.folder / str(group).lstrip("/"), f"{group}{mark}")


def _mark(root: Path) -> str:
    inode = or_none(lambda: root.stat().st_ino)
    return "" if inode in (None, _ROOT_INODE) else f"@{inode}"


def _lines(file: Path) -> list[str]:
    return (or_none(lambda: file.read_text(encoding="utf-8", errors="replace")) or "").splitlines()
