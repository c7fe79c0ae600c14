"""The cause slow-directory: what the run writes to, or reads its data from, answers slowly."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.rules.kit import WRITTEN, Checked, Tried, path_words, tried
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# A logger that appends once a step may take this long before steps of 100 ms show it.
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
def slow_directory(view: Checked) -> Iterable[Problem]:
    """Appending to or syncing a directory, or reading from one, takes longer than a training step should wait for it.

    Symptom:
        Rank 0 is late in every step that logs, and the longer the more is in the file; or loaders cannot keep up.

    Cause:
        A network file system, object storage that is mounted as files, or a disk that others keep busy.

    Remedy:
        Local disks, or writing in the background.

    Cannot see:
        How it is under load, and caches that make the check's small files faster than the run's.
    """
    problems = (problem for directory in tried(view) for problem in _problems(directory))
    return problems


def _problems(directory: Tried) -> Iterator[Problem]:
    slow = {rank: slowness for rank, one in directory.items() if (slowness := _slowness(one)) > 1.0}
    if slow:
        worst = max(slow, key=lambda rank: slow[rank])
        others = f", the slowest of {len(slow):,} ranks" if len(slow) > 1 else ""
        text = f"{path_words(directory[worst])}: {', '.join(_words(directory[worst]))}{others}"
        yield Problem(ranks=tuple(slow), text=text, badness=slow[worst])


def _slowness(one: DirectoryFacts) -> float:
    """The largest of its times, as a multiple of what it may be."""
    return max((seconds / allowed for _, seconds, allowed in _times(one)), default=0.0)


def _words(one: DirectoryFacts) -> list[str]:
    return [
        f"{what} {seconds * 1e3:,.0f} ms (up to {allowed * 1e3:,.0f} ms is well)"
        for what, seconds, allowed in _times(one)
        if seconds > allowed
    ]


def _times(one: DirectoryFacts) -> Iterator[tuple[str, float, float]]:
    times = (("append", one.append_s, _APPEND_S), ("slowest append", one.append_worst_s, _WORST_S))
    written = (*times, ("fsync", one.fsync_s, _FSYNC_S))
    asked = written if one.role in WRITTEN else (("opening and reading 4 KiB", one.read_s, _READ_S),)
    for what, seconds, allowed in asked:
        if seconds is not None:
            yield what, seconds, allowed
