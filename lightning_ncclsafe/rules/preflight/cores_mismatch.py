"""The cause cores-mismatch: ranks are bound to fewer cores than were asked for, or to each other's."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.rules.kit import Checked, Host
from lightning_ncclsafe.rules.preflight.problem import Problem, check


@check(
    after="socket-fallback",
    remedy=(
        "Bind each rank to cores of its own: srun --cpus-per-task=$SLURM_CPUS_PER_TASK (or export SRUN_CPUS_PER_TASK; "
        "since Slurm 22.05 srun does not take sbatch's --cpus-per-task), torchrun --numa-binding, mpirun --bind-to."
    ),
)
def cores_mismatch(view: Checked) -> Iterable[Problem]:
    """A rank may run on fewer cores than Slurm gave it, on a single one, or on some of those of another rank.

    Symptom:
        Loaders are slow however many workers they have; NCCL's threads wait for the one core there is.

    Cause:
        srun without --cpus-per-task, a launcher that binds each process to one core, binding by hand that overlaps.

    Remedy:
        Pass the number of cores to what starts the ranks.

    Cannot see:
        Other jobs on the same cores.
    """
    problems = (problem for host in view.hosts for problem in (*_too_few(host), *_single(host), *_overlapping(host)))
    return problems


def _too_few(host: Host) -> Iterator[Problem]:
    for rank, facts in host.facts.items():
        cores, asked = len(facts.capacity.cpus), facts.capacity.slurm_cpus_per_task
        if asked is not None and 0 < cores < asked:
            text = f"bound to {cores:,} of the {asked:,} cores of SLURM_CPUS_PER_TASK"
            yield Problem(ranks=(rank,), text=text, badness=asked / cores)


def _single(host: Host) -> Iterator[Problem]:
    """On a host with a single core there is no other way."""
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
