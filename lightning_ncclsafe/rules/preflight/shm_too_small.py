"""The cause shm-too-small: the batches in flight do not fit into /dev/shm."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.rules.kit import Checked, Facts, Severity, in_flight_bytes, least, most, size_words, total
from lightning_ncclsafe.rules.preflight.problem import Problem, check

DOCKER_DEFAULT_BYTES = 64 * 2**20
"""What a container gets unless it is told otherwise (docker run --shm-size)."""


@check(
    after="gpu-memory-short",
    remedy=(
        "Give the container more shared memory: docker run --shm-size=16g or --ipc=host, 'ipc: host' or shm_size in a "
        "compose file, an emptyDir with medium: Memory at /dev/shm in Kubernetes; or lower num_workers and "
        "prefetch_factor of the loaders."
    ),
)
def shm_too_small(view: Checked) -> Iterable[Problem]:
    """/dev/shm, through which workers and NCCL hand over data, has less room than the batches in flight need.

    Symptom:
        "Bus error" or "unable to write to file </torch_...>" in a worker, NCCL errors about shared memory, or a rank
        that waits for a batch forever.

    Cause:
        A container with Docker's default of 64 MB, or many workers with many large batches each.

    Remedy:
        More shared memory for the container, or fewer batches in flight.

    Cannot see:
        Loaders whose workers share memory by files elsewhere.
    """
    problems = (problem for host in view.hosts for part in host.parts() for problem in _problems(part))
    return problems


def _problems(facts: Facts) -> Iterator[Problem]:
    free = least(one.capacity.shm_free_bytes for one in facts.values())
    size = least(one.capacity.shm_total_bytes for one in facts.values())
    need = sum(in_flight_bytes(one) for one in facts.values())
    if free is not None and need > free:
        batch = most((one.load.batch_bytes for one in facts.values() if one.load.batches_in_flight), 0)
        text = f"{size_words(free)} free in /dev/shm{_default_words(size)} for {_need_words(facts, need)}"
        severity = Severity.ERROR if batch > free else Severity.WARNING
        yield Problem(ranks=tuple(facts), text=text, badness=float(need - free), severity=severity)
    elif size is not None and size <= DOCKER_DEFAULT_BYTES and _uses(facts):
        yield Problem(ranks=tuple(facts), text=f"/dev/shm has only {size_words(size)}{_default_words(size)}")


def _need_words(facts: Facts, need: int) -> str:
    counts = [one.load.batches_in_flight for one in facts.values() if in_flight_bytes(one)]
    batches, ranks = total(counts), f" of {len(counts)} ranks" if len(counts) > 1 else ""
    return f"{batches:,} {'batch' if batches == 1 else 'batches'} in flight{ranks}, {size_words(need)}"


def _default_words(size: int | None) -> str:
    return " (Docker's default of 64 MB)" if size == DOCKER_DEFAULT_BYTES else ""


def _uses(facts: Facts) -> bool:
    """Whether anything goes through it: batches of workers, or what NCCL hands over between GPUs of a host."""
    values = facts.values()
    return any(one.load.loader_workers for one in values) or (len(facts) > 1 and any(one.is_cuda for one in values))
