"""Ranks that do not answer, and hosts with wrong limits or clocks."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import JobHosts, duration_words, ranks_by
from lightning_ncclsafe.rules.preflight.problem import Problem, check


@check(
    after="too-many-workers",
    remedy=(
        "Look at this rank's own output: it failed, was never started, or is delayed before the check, by imports from "
        "a slow file system, swapping, or loading the dataset. Compare the launcher's number of ranks with those that "
        "run."
    ),
    source="process",
)
def silent_at_preflight(view: JobHosts) -> Iterator[Problem]:
    """Some ranks did not take part in the check of the hosts.

    Symptom:
        The other ranks would wait for them when the process group is created, or in the first collective.

    Cause:
        A rank failed, was killed, was never started, or is much slower to start than the others.

    Remedy:
        Look at the rank's own output.

    Cannot see:
        What the rank does instead, unless a rank of the same host has seen it.
    """
    job = view.job
    states = {process.rank: process.state for process in job.witnessed}
    by_state = ranks_by({rank: states.get(rank, "") for rank in job.silent})
    for state, ranks in by_state.items() if view.facts else ():
        there = f", {'its process is' if len(ranks) == 1 else 'their processes are'} {state}" if state else ""
        text = f"no answer, {len(job.ranks):,} of {job.world_size:,} ranks answered{there}"
        yield Problem(ranks=ranks, text=text, badness=float(bool(state)))


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
def too_few_open_files(view: JobHosts) -> Iterator[Problem]:
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


_APART_S = 1.0


@check(
    after="slow-directory",
    remedy="Synchronise the clocks of all hosts (chronyc tracking, timedatectl), with the same server.",
)
def clocks_apart(view: JobHosts) -> Iterator[Problem]:
    """A host's clock is more than a second ahead of or behind rank 0's.

    Symptom:
        Log files cannot be ordered, certificates and tokens are refused, files on shared storage seem to be from the
        future, as do checkpoints and caches that are compared by time.

    Cause:
        No time service on that host, or one that cannot reach its server.

    Remedy:
        Synchronise the clocks.

    Cannot see:
        Clocks that drift apart later.
    """
    for host in view.hosts:
        offsets = [
            (abs(one.clock_offset_s) - (one.clock_error_s or 0.0), one.clock_offset_s)
            for one in host.facts.values()
            if one.clock_offset_s is not None
        ]
        certain_s, offset_s = max(offsets, default=(0.0, 0.0))
        if certain_s > _APART_S:
            text = f"the clock is {duration_words(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} rank 0's"
            yield Problem(ranks=host.ranks, text=text, badness=certain_s)
