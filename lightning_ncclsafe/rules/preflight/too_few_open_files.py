"""The cause too-few-open-files: the limit of open files does not suffice for the loaders' workers."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# A worker costs its parent two pipes and a sentinel, a batch in flight one descriptor for each of its tensors
# (sharing strategy "file_descriptor", torch's default on Linux), of which there are two at least: input and target.
_PER_WORKER = 5
_PER_BATCH = 2
_ENOUGH = 4_096
_MANY_WORKERS = 8


@check(
    after="full-directory",
    remedy=(
        "Raise the soft limit before the run (ulimit -n 65536, LimitNOFILE= of a service, --ulimit nofile= of a "
        "container), or call torch.multiprocessing.set_sharing_strategy('file_system')."
    ),
)
def too_few_open_files(view: Checked) -> Iterator[Problem]:
    """The soft limit of open files is below what workers and their batches need, or below 4,096 with many workers.

    Symptom:
        "Too many open files", "received 0 items of ancdata", sometimes only after hours.

    Cause:
        A soft limit of 1,024, which most systems set, and loaders that hand every tensor over as a file descriptor.

    Remedy:
        Raise the limit, or share memory by file names.

    Cannot see:
        How many tensors a batch has, and files that the dataset keeps open.
    """
    for rank, facts in view.facts.items():
        limit, workers = facts.open_files_limit, facts.load.loader_workers or 0
        need = (facts.open_files or 0) + workers * _PER_WORKER + (facts.load.batches_in_flight or 0) * _PER_BATCH
        if limit is None or not workers or limit < 0:
            continue
        if need > limit or (limit < _ENOUGH and workers >= _MANY_WORKERS):
            text = (
                f"{limit:,} open files are allowed for {workers:,} loader workers and "
                f"{facts.load.batches_in_flight or 0:,} batches in flight"
            )
            yield Problem(ranks=(rank,), text=text, badness=float(need - limit))
