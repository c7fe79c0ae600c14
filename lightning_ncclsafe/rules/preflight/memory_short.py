"""The cause memory-short: what is about to be held in memory does not fit."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit import Checked, Facts, Host, Severity, in_flight_bytes, least, most, size_words
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# As in rules.memory: less than this share left is short, whatever is asked for.
_SCARCE = 0.05


@check(
    after="shm-too-small",
    remedy=(
        "Lower num_workers or prefetch_factor of the loaders, or the batch size; keep the dataset out of the processes "
        "(memory-mapped files); or raise the memory limit (--mem, resources.limits.memory)."
    ),
)
def memory_short(view: Checked) -> Iterable[Problem]:
    """The batches that workers hold ready, and a model on the CPU, need more memory than is left.

    Symptom:
        The kernel kills a worker or a rank, or the host starts to swap; the other ranks wait until they time out.

    Cause:
        num_workers times prefetch_factor batches for each loader and rank; a dataset that each process loads in full;
        a memory limit of the container that is below the host's memory.

    Remedy:
        Fewer batches in flight, or a higher limit.

    Cannot see:
        What the workers use for themselves, and what grows later.
    """
    problems = (problem for host in view.hosts for problem in (*_of_groups(host), *_of_host(host), *_of_ranks(host)))
    return problems


def _of_groups(host: Host) -> Iterator[Problem]:
    for container in host.parts():
        for group in sorted({group for one in container.values() for group in _lefts(one)}):
            members = {rank: one for rank, one in container.items() if group in _lefts(one)}
            sizes = (one.capacity.memory_limit_bytes for one in members.values() if one.capacity.memory_group == group)
            size = most(sizes, 0)
            limit = f"left of the {size_words(size)} limit of the control group"
            words = limit if size else f"left by the control group {group}"
            yield from _problem(members, min(_lefts(one)[group] for one in members.values()), size, words)


def _lefts(facts: PreflightFacts) -> dict[str, int]:
    """What each control group with a limit leaves, by its path."""
    capacity = facts.capacity
    if capacity.memory_left_bytes or capacity.memory_limit_bytes is None or capacity.memory_used_bytes is None:
        return capacity.memory_left_bytes
    return {capacity.memory_group: capacity.memory_limit_bytes - capacity.memory_used_bytes}


def _of_host(host: Host) -> Iterator[Problem]:
    available = least(one.capacity.memory_available_bytes for one in host.facts.values())
    if available is not None:
        size = most((one.capacity.memory_total_bytes for one in host.facts.values()), 0)
        of = f" of {size_words(size)}" if size else ""
        yield from _problem(host.facts, available, size, f"available{of} on the host")


def _of_ranks(host: Host) -> Iterator[Problem]:
    """A process's own limit, which its worker processes inherit and do not share."""
    for rank, one in host.facts.items():
        limit, replica = one.capacity.process_limit_bytes, _replica(one)
        if limit is not None and replica > limit:
            text = f"the model needs {size_words(replica)}, ulimit lets the process allocate {size_words(limit)}"
            yield Problem(ranks=(rank,), text=text, badness=replica - limit, severity=Severity.ERROR)


def _problem(facts: Facts, left: int, size: int, left_words: str) -> Iterator[Problem]:
    batches = sum(in_flight_bytes(one) for one in facts.values())
    replicas = sum(_replica(one) for one in facts.values())
    need = batches + replicas
    if need > left or left < _SCARCE * size:
        wanted = [f"{size_words(batches)} of batches in flight"] if batches else []
        wanted += [f"{size_words(replicas)} for models on the CPU"] if replicas else []
        there = f"only {size_words(max(left, 0))} {left_words}"
        text = f"{there} for {' and '.join(wanted)}" if wanted else there
        severity = Severity.ERROR if replicas > max(left, 0) else Severity.WARNING
        yield Problem(ranks=tuple(facts), text=text, badness=float(need - left), severity=severity)


def _replica(facts: PreflightFacts) -> int:
    """What a model on the CPU will need besides its parameters, which are there already; 0 on a GPU."""
    if facts.is_cuda:
        return 0
    return max((facts.load.replica_bytes or 0) - (facts.load.parameter_bytes or 0), 0)
