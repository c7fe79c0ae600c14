"""The cause unusable-directory: a directory that the run needs cannot be written to, or read."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.rules.kit import WRITTEN, Checked, Severity, path_words, tried
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# How the probe puts it where it ran out of time, so that the directory may answer yet, and where there is no directory.
_UNANSWERED = ("no answer", "without an answer")
_NOT_TRIED = "not tried"


@check(
    remedy=(
        "Mount the directory on every host and let the job's user write there (ls -ld, df; -v of docker run), or "
        "choose another one (default_root_dir, the logger's save_dir, dirpath)."
    ),
    source="storage",
)
def unusable_directory(view: Checked) -> Iterable[Problem]:
    """Trying out a directory for logs, checkpoints or data failed.

    Symptom:
        A rank fails when it first logs, saves or reads, or is stuck in a system call that cannot be interrupted.

    Cause:
        A mount that is missing or dead on one host, a read-only file system, another user in the container.

    Remedy:
        Mend the mount or the permissions, or use another directory.

    Cannot see:
        Directories that are only chosen later.
    """
    problems = (
        _problem(rank, one)
        for directory in tried(view)
        for rank, one in directory.items()
        if one.problem.strip() and _NOT_TRIED not in one.problem
    )
    return problems


def _problem(rank: int, one: DirectoryFacts) -> Problem:
    # Lightning's loggers and most checkpoints are written by rank 0 alone.
    fails = one.role in WRITTEN and rank == 0 and not any(words in one.problem for words in _UNANSWERED)
    text = f"{path_words(one)} cannot be used: {one.problem.strip().rstrip('.')}"
    return Problem(ranks=(rank,), text=text, severity=Severity.ERROR if fails else Severity.WARNING)
