"""Directories that cannot be written to, have no room left, or are slow."""

from collections import defaultdict
from collections.abc import Iterator

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.rules.kit import JobHosts, Severity, most, size_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# The roles of directories that the run writes to.
_WRITTEN = ("logs", "checkpoints")
_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"} | {
    "orangefs",
    "panfs",
    "smb3",
    "smbfs",
    "virtiofs",
    "wekafs",
}

CheckedDirectory = dict[int, DirectoryFacts]
"""What some ranks have found about one directory."""


def checked_directories(view: JobHosts) -> list[CheckedDirectory]:
    """The directories that ranks have checked, by role and path, each with what its ranks found."""
    found: dict[tuple[str, str], CheckedDirectory] = defaultdict(dict)
    for rank, facts in view.facts.items():
        for directory in facts.directories:
            found[directory.role, directory.path][rank] = directory
    return list(found.values())


def _path_words(directory: DirectoryFacts) -> str:
    """``"the logs at /mnt/logs (nfs4, a network file system)"``."""
    kind = directory.filesystem
    network = ", a network file system" if kind in _NETWORK or kind.startswith("fuse.") else ""
    return f"the {directory.role} at {directory.path}{f' ({kind}{network})' if kind else ''}"


# Words of the probe if its time was up, so that the directory may still answer, and if there is no directory.
_UNANSWERED = ("no answer", "without an answer")
_NOT_TRIED = "not tried"


@check(
    remedy=(
        "Mount the directory on every host and let the job's user write there (ls -ld, df; -v of docker run), or "
        "choose another one (default_root_dir, the logger's save_dir, dirpath)."
    ),
    source="storage",
)
def unusable_directory(view: JobHosts) -> Iterator[Problem]:
    """A directory for logs, checkpoints or data failed the check.

    Symptom:
        A rank fails when it first logs, saves or reads, or is stuck in a system call that cannot be interrupted.

    Cause:
        A mount that is missing or dead on one host, a read-only file system, another user in the container.

    Remedy:
        Fix the mount or the permissions, or use another directory.

    Cannot see:
        Directories that are chosen only later.
    """
    for directory in checked_directories(view):
        for rank, one in directory.items():
            if one.problem.strip() and _NOT_TRIED not in one.problem:
                yield _problem(rank, one)


def _problem(rank: int, one: DirectoryFacts) -> Problem:
    # Lightning's loggers and most checkpoints are written by rank 0 alone.
    fails = one.role in _WRITTEN and rank == 0 and not any(words in one.problem for words in _UNANSWERED)
    text = f"{_path_words(one)} cannot be used: {one.problem.strip().rstrip('.')}"
    return Problem(ranks=(rank,), text=text, severity=Severity.ERROR if fails else Severity.WARNING)


_LEAST_BYTES = 2**30
_LEAST_FILES = 1_000
# While a checkpoint is written, the one that it replaces is still there.
_CHECKPOINTS = 2
# Other file systems create inodes on demand and may report none.
_COUNTS_INODES = ("ext", "xfs", "tmpfs", "overlay")


@check(
    after="cores-mismatch",
    remedy="Free space there, raise the quota, or write elsewhere (default_root_dir, dirpath); keep fewer checkpoints.",
    source="storage",
)
def full_directory(view: JobHosts) -> Iterator[Problem]:
    """A directory for logs or checkpoints has less room than the run is about to need.

    Symptom:
        Rank 0 fails with "No space left on device" hours later, and the others wait for it until they time out.

    Cause:
        A full disk, a quota, or too many small files.

    Remedy:
        Free space, or write elsewhere.

    Cannot see:
        How many checkpoints will be kept, the optimizer's part of them, and quotas that the file system hides.
    """
    model = most((facts.load.parameter_bytes for facts in view.facts.values()), 0)
    for directory in checked_directories(view):
        for rank, one in directory.items():
            for text in _room_words(one, model) if one.role in _WRITTEN else ():
                yield Problem(ranks=(rank,), text=text, badness=-float(one.free_bytes or 0))


def _room_words(one: DirectoryFacts, model: int) -> Iterator[str]:
    need = max(_LEAST_BYTES, _CHECKPOINTS * model if one.role == "checkpoints" else 0)
    if one.free_bytes is not None and one.free_bytes < need:
        why = f", and two checkpoints of the model alone take {size_words(need)}" if need > _LEAST_BYTES else ""
        yield f"{size_words(max(one.free_bytes, 0))} free for {_path_words(one)}{why}"
    files = one.free_inodes
    if files is not None and files < _LEAST_FILES and (files > 0 or one.filesystem.startswith(_COUNTS_INODES)):
        yield f"only {files:,} more files can be created for {_path_words(one)}"


# A logger that appends once per step may take this long before steps of 100 ms are noticeably slower.
_APPEND_S = 0.010
_WORST_S = 0.200
_FSYNC_S = 0.500
_READ_S = 0.050


@check(
    after="ignored-settings",
    remedy=(
        "Write logs to a local disk and copy them afterwards, or take them off the training thread (LoggerOffload); "
        "copy data to a local disk, or read it in larger pieces with more workers; write checkpoints asynchronously."
    ),
    source="storage",
)
def slow_directory(view: JobHosts) -> Iterator[Problem]:
    """Appending to or syncing a directory, or reading from one, takes longer than a training step should wait for it.

    Symptom:
        Rank 0 is late in every step that logs, and more so the larger the file grows; or loaders cannot keep up.

    Cause:
        A network file system, object storage that is mounted as files, or a disk that others keep busy.

    Remedy:
        Use local disks, or write in the background.

    Cannot see:
        How it is under load, and caches that make the check's small files faster than the run's.
    """
    for directory in checked_directories(view):
        slow = {rank: slowness for rank, one in directory.items() if (slowness := _slowness(one)) > 1.0}
        if slow:
            worst = max(slow, key=lambda rank: slow[rank])
            others = f", the slowest of {len(slow):,} ranks" if len(slow) > 1 else ""
            text = f"{_path_words(directory[worst])}: {', '.join(_speed_words(directory[worst]))}{others}"
            yield Problem(ranks=tuple(slow), text=text, badness=slow[worst])


def _slowness(one: DirectoryFacts) -> float:
    """The largest of its times, as a multiple of the allowed time."""
    return max((seconds / allowed for _, seconds, allowed in _times(one)), default=0.0)


def _speed_words(one: DirectoryFacts) -> list[str]:
    return [
        f"{what} {seconds * 1e3:,.0f} ms (up to {allowed * 1e3:,.0f} ms is fine)"
        for what, seconds, allowed in _times(one)
        if seconds > allowed
    ]


def _times(one: DirectoryFacts) -> Iterator[tuple[str, float, float]]:
    times = (("append", one.append_s, _APPEND_S), ("slowest append", one.append_worst_s, _WORST_S))
    written = (*times, ("fsync", one.fsync_s, _FSYNC_S))
    relevant = written if one.role in _WRITTEN else (("opening and reading 4 KiB", one.read_s, _READ_S),)
    for what, seconds, allowed in relevant:
        if seconds is not None:
            yield what, seconds, allowed
