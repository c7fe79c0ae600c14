"""The cause too-many-workers: loader workers and threads have fewer cores than they keep busy."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import Checked, Severity, core_pools, core_shares, threads, total
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_ERROR_ABOVE = 2.0
_ROUNDING = 1e-6  # shares are sums of fractions


@check(
    after="different-versions",
    remedy=(
        "Lower num_workers of the loaders (validation loaders with persistent workers count too), or give each rank "
        "more cores (--cpus-per-task); LoaderTuner leaves four for each core at most."
    ),
)
def too_many_workers(view: Checked) -> Iterator[Problem]:
    """The workers and threads of all ranks on a host are more than the cores that they may run on.

    Symptom:
        Steps of uneven length, collectives that wait for a rank without a core, in the end a timeout.

    Cause:
        num_workers was chosen for one process and is multiplied by the ranks of the host, or by several loaders; a
        quota or a mask leaves fewer cores than the machine has.

    Remedy:
        Fewer workers, or more cores for each rank.

    Cannot see:
        Other jobs on the host, and workers that mostly wait for storage and need less than a core.
    """
    for host in view.hosts:
        shares = core_shares(host)
        for pool in core_pools(host):
            ranks = tuple(rank for rank in pool if rank in shares)
            cores = sum(shares[rank] for rank in ranks)
            workers = total(host.facts[rank].load.loader_workers for rank in ranks)
            busy = sum(threads(host.facts[rank], shares[rank]) for rank in ranks)
            if workers > 0 and workers + busy > cores + _ROUNDING:
                yield _problem(ranks, workers, busy, cores)


def _problem(ranks: tuple[int, ...], workers: int, busy: int, cores: float) -> Problem:
    ratio = (workers + busy) / cores
    room = max(int((cores - busy + _ROUNDING) // len(ranks)), 0)
    text = (
        f"{workers:,} loader {'worker' if workers == 1 else 'workers'} and {busy:,} other "
        f"{'thread' if busy == 1 else 'threads'} on {round(cores, 1):g} "
        f"{'core' if cores == 1 else 'cores'}, {ratio:.1f} for each core; there is room for {room:,} "
        f"{'worker' if room == 1 else 'workers'} per rank"
    )
    severity = Severity.ERROR if ratio > _ERROR_ABOVE + _ROUNDING else Severity.WARNING
    return Problem(ranks=ranks, text=text, badness=ratio, severity=severity)
