"""Ranks that have too few cores for their workers, or not the intended ones."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit import Host, JobHosts, Severity, counted, ranks_by, total
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_ERROR_ABOVE = 2.0
_ROUNDING = 1e-6  # shares are sums of fractions


@check(
    after="different-versions",
    remedy=(
        "Lower num_workers of the loaders (validation loaders with persistent workers count too), or give each rank "
        "more cores (--cpus-per-task); LoaderTuner allows at most four per core."
    ),
)
def too_many_workers(view: JobHosts) -> Iterator[Problem]:
    """All ranks of a host together have more workers and threads than cores that they may run on.

    Symptom:
        Steps of uneven length, collectives that wait for a rank without a core, and finally a timeout.

    Cause:
        num_workers was chosen for one process and is multiplied by the ranks of the host, or by several loaders; a
        quota or a mask leaves fewer cores than the machine has.

    Remedy:
        Use fewer workers, or give each rank more cores.

    Cannot see:
        Other jobs on the host, and workers that mostly wait for storage and need less than a core.
    """
    for host in view.hosts:
        shares = host.core_shares()
        for pool in _pools(host):
            ranks = tuple(rank for rank in pool if rank in shares)
            cores = sum(shares[rank] for rank in ranks)
            workers = total(host.facts[rank].load.loader_workers for rank in ranks)
            busy = sum(_threads(host.facts[rank], shares[rank]) for rank in ranks)
            if workers > 0 and workers + busy > cores + _ROUNDING:
                yield _problem(ranks, workers, busy, cores)


def _pools(host: Host) -> list[tuple[int, ...]]:
    """Ranks that share the same cores under the same quotas; ranks that are not bound are one pool."""
    shared = {rank: (frozenset(host.quotas(rank)), facts.capacity.cpus) for rank, facts in host.facts.items()}
    return [*ranks_by(shared).values()]


def _threads(facts: PreflightFacts, share: float) -> int:
    """How many busy threads a rank has besides its workers.

    A pool of threads no larger than the rank's share is what torch and Lightning set by default, and works in bursts;
    with a GPU it has next to nothing to do. In both cases only the main thread counts.
    """
    pool = facts.load.omp_threads or 1
    return 1 if facts.is_cuda or pool <= max(share, 1.0) else pool


def _problem(ranks: tuple[int, ...], workers: int, busy: int, cores: float) -> Problem:
    ratio = (workers + busy) / cores
    room = max(int((cores - busy + _ROUNDING) // len(ranks)), 0)
    text = (
        f"{counted(workers, 'loader worker')} and {counted(busy, 'other thread')} on {round(cores, 1):g} "
        f"{'core' if cores == 1 else 'cores'}, {ratio:.1f} for each core; there is room for {counted(room, 'worker')} "
        "per rank"
    )
    severity = Severity.ERROR if ratio > _ERROR_ABOVE + _ROUNDING else Severity.WARNING
    return Problem(ranks=ranks, text=text, badness=ratio, severity=severity)


@check(
    after="socket-fallback",
    remedy=(
        "Bind each rank to its own cores: srun --cpus-per-task=$SLURM_CPUS_PER_TASK (or export SRUN_CPUS_PER_TASK; "
        "since Slurm 22.05 srun does not take sbatch's --cpus-per-task), torchrun --numa-binding, mpirun --bind-to."
    ),
)
def cores_mismatch(view: JobHosts) -> Iterator[Problem]:
    """A rank may run on fewer cores than Slurm gave it, on a single one, or on some of those of another rank.

    Symptom:
        Loaders are slow however many workers they have; NCCL's threads wait for the one core there is.

    Cause:
        srun without --cpus-per-task, a launcher that binds each process to one core, manual binding that overlaps.

    Remedy:
        Pass the number of cores to what starts the ranks.

    Cannot see:
        Other jobs on the same cores.
    """
    for host in view.hosts:
        yield from _too_few(host)
        yield from _single(host)
        yield from _overlapping(host)


def _too_few(host: Host) -> Iterator[Problem]:
    for rank, facts in host.facts.items():
        cores, asked = len(facts.capacity.cpus), facts.capacity.slurm_cpus_per_task
        if asked is not None and 0 < cores < asked:
            text = f"bound to {cores:,} of the {asked:,} cores of SLURM_CPUS_PER_TASK"
            yield Problem(ranks=(rank,), text=text, badness=asked / cores)


def _single(host: Host) -> Iterator[Problem]:
    """Ranks that are bound to one core, unless the host has only one."""
    cores = {cpu for facts in host.facts.values() for cpu in facts.capacity.cpus}
    for rank, facts in host.facts.items():
        if len(facts.capacity.cpus) == 1 and len(cores) > 1 and not (facts.capacity.slurm_cpus_per_task or 0) > 1:
            text = "bound to one core, which the training, NCCL's threads and the loader's have to share"
            yield Problem(ranks=(rank,), text=text, badness=1.0)


def _overlapping(host: Host) -> Iterator[Problem]:
    masks = {facts.capacity.cpus for facts in host.facts.values() if facts.capacity.cpus}
    sets = [frozenset(mask) for mask in masks]
    mixed = {one for one in sets for other in sets if one != other and one & other}
    if mixed:
        ranks = tuple(rank for rank, facts in host.facts.items() if frozenset(facts.capacity.cpus) in mixed)
        sizes = sorted({len(one) for one in mixed})
        cores = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        yield Problem(ranks=ranks, text=f"bound to different masks of {cores} cores that overlap")
