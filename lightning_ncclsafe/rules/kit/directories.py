"""Questions about the directories that ranks have tried out."""

from collections import defaultdict

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.rules.kit.hosts import Checked

WRITTEN = ("logs", "checkpoints")
"""The roles of directories that the run writes to."""

_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"} | {
    "orangefs",
    "panfs",
    "smb3",
    "smbfs",
    "virtiofs",
    "wekafs",
}

Tried = dict[int, DirectoryFacts]
"""What each of some ranks has found of one directory."""


def tried(view: Checked) -> list[Tried]:
    """The directories that ranks have tried out, by role and path, each with what its ranks have found."""
    found: dict[tuple[str, str], Tried] = defaultdict(dict)
    for rank, facts in view.facts.items():
        for directory in facts.directories:
            found[directory.role, directory.path][rank] = directory
    return list(found.values())


def path_words(directory: DirectoryFacts) -> str:
    """``"the logs at /mnt/logs (nfs4, a network file system)"``."""
    kind = directory.filesystem
    network = ", a network file system" if kind in _NETWORK or kind.startswith("fuse.") else ""
    return f"the {directory.role} at {directory.path}{f' ({kind}{network})' if kind else ''}"
