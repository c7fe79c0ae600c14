"""The cause full-directory: what the run writes to has next to no room left."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.rules.kit import WRITTEN, Checked, most, path_words, size_words, tried
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_LEAST_BYTES = 2**30
_LEAST_FILES = 1_000
# While a checkpoint is written, the one that it replaces is still there.
_CHECKPOINTS = 2
# The others make their inodes as they need them and may say that there is none.
_COUNTS_INODES = ("ext", "xfs", "tmpfs", "overlay")


@check(
    after="cores-mismatch",
    remedy="Free space there, raise the quota, or write elsewhere (default_root_dir, dirpath); keep fewer checkpoints.",
    source="storage",
)
def full_directory(view: Checked) -> Iterable[Problem]:
    """A directory for logs or checkpoints has less room than the run is about to need.

    Symptom:
        Rank 0 fails with "No space left on device" hours later, and the others wait for it until they time out.

    Cause:
        A full disk, a quota, or too many small files.

    Remedy:
        Make room, or write elsewhere.

    Cannot see:
        How many checkpoints will be kept, the optimizer's part of them, and quotas that the file system hides.
    """
    model = most((facts.load.parameter_bytes for facts in view.facts.values()), 0)
    problems = (
        Problem(ranks=(rank,), text=text, badness=-float(one.free_bytes or 0))
        for directory in tried(view)
        for rank, one in directory.items()
        if one.role in WRITTEN
        for text in _words(one, model)
    )
    return problems


def _words(one: DirectoryFacts, model: int) -> Iterator[str]:
    need = max(_LEAST_BYTES, _CHECKPOINTS * model if one.role == "checkpoints" else 0)
    if one.free_bytes is not None and one.free_bytes < need:
        why = f", and two checkpoints of the model alone take {size_words(need)}" if need > _LEAST_BYTES else ""
        yield f"{size_words(max(one.free_bytes, 0))} free for {path_words(one)}{why}"
    files = one.free_inodes
    if files is not None and files < _LEAST_FILES and (files > 0 or one.filesystem.startswith(_COUNTS_INODES)):
        yield f"only {files:,} more files can be made for {path_words(one)}"
