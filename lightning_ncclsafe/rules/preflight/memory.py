"""Hosts that lack memory, or shared memory, or have begun to swap."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit import (
    Host,
    JobHosts,
    PreflightByRank,
    Severity,
    counted,
    in_flight_bytes,
    least,
    most,
    size_words,
    total,
)
from lightning_ncclsafe.rules.preflight.problem import Problem, check

DOCKER_DEFAULT_BYTES = 64 * 2**20
"""The size that a container gets without docker run --shm-size."""


@check(
    after="gpu-memory-short",
    remedy=(
        "Give the container more shared memory: docker run --shm-size=16g or --ipc=host, 'ipc: host' or shm_size in a "
        "compose file, an emptyDir with medium: Memory at /dev/shm in Kubernetes; or lower num_workers and "
        "prefetch_factor of the loaders."
    ),
)
def shm_too_small(view: JobHosts) -> Iterator[Problem]:
    """/dev/shm, through which workers and NCCL hand over data, has less room than the batches in flight need.

    Symptom:
        "Bus error" or "unable to write to file </torch_...>" in a worker, NCCL errors about shared memory, or a rank
        that waits for a batch forever.

    Cause:
        A container with Docker's default of 64 MB, or many workers with many large batches each.

    Remedy:
        Give the container more shared memory, or keep fewer batches in flight.

    Cannot see:
        Loaders whose workers share memory through files elsewhere.
    """
    for host in view.hosts:
        for container in host.parts():
            yield from _too_small(container)


def _too_small(facts: PreflightByRank) -> Iterator[Problem]:
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


def _need_words(facts: PreflightByRank, need: int) -> str:
    counts = [one.load.batches_in_flight for one in facts.values() if in_flight_bytes(one)]
    batches, ranks = total(counts), f" of {len(counts)} ranks" if len(counts) > 1 else ""
    return f"{counted(batches, 'batch')} in flight{ranks}, {size_words(need)}"


def _default_words(size: int | None) -> str:
    return " (Docker's default of 64 MB)" if size == DOCKER_DEFAULT_BYTES else ""


def _uses(facts: PreflightByRank) -> bool:
    """Whether anything uses it: workers that pass batches, or NCCL between GPUs of a host."""
    values = facts.values()
    return any(one.load.loader_workers for one in values) or (len(facts) > 1 and any(one.is_cuda for one in values))


# If less than this share is left, memory is short, whatever the run requires.
_SCARCE = 0.05


@check(
    after="shm-too-small",
    remedy=(
        "Lower num_workers or prefetch_factor of the loaders, or the batch size; keep the dataset out of the processes "
        "(memory-mapped files); or raise the memory limit (--mem, resources.limits.memory)."
    ),
)
def memory_short(view: JobHosts) -> Iterator[Problem]:
    """The batches that workers prefetch, and a model on the CPU, need more memory than is left.

    Symptom:
        The kernel kills a worker or a rank, or the host starts to swap; the other ranks wait until they time out.

    Cause:
        num_workers times prefetch_factor batches for each loader and rank; a dataset that each process loads in full; a
        memory limit of the container that is below the host's memory.

    Remedy:
        Keep fewer batches in flight, or raise the limit.

    Cannot see:
        What the workers use for themselves, and what grows later.
    """
    for host in view.hosts:
        yield from _of_groups(host)
        yield from _of_host(host)
        yield from _of_ranks(host)


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
    """The memory left in each control group with a limit, by its path."""
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
    """Limits of single processes, which worker processes inherit but do not share."""
    for rank, one in host.facts.items():
        limit, replica = one.capacity.process_limit_bytes, _replica(one)
        if limit is not None and replica > limit:
            text = f"the model needs {size_words(replica)}, ulimit lets the process allocate {size_words(limit)}"
            yield Problem(ranks=(rank,), text=text, badness=replica - limit, severity=Severity.ERROR)


def _problem(facts: PreflightByRank, left: int, size: int, left_words: str) -> Iterator[Problem]:
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
    """The memory that a model on the CPU will need besides its parameters, which exist already; 0 on a GPU."""
    if facts.is_cuda:
        return 0
    return max((facts.load.replica_bytes or 0) - (facts.load.parameter_bytes or 0), 0)


@check(
    after="unreachable-interface",
    remedy=(
        "Put swap space on a local disk, or switch it off (swapoff), and reduce memory use so that it is not needed."
    ),
)
def swap_on_network(view: JobHosts) -> Iterator[Problem]:
    """Swap space is on a network file system or device.

    Symptom:
        A rank that runs out of memory pauses for minutes, and the others time out, at start-up often with
        "store->get('0') got error: Socket Timeout".

    Cause:
        A swap file or device that is mounted from elsewhere: each page that is read back crosses the network.

    Remedy:
        Swap to a local disk, or not at all.

    Cannot see:
        Network disks that the host sees as local ones, as in some virtual machines.
    """
    for host in view.hosts:
        devices = sorted({device for one in host.facts.values() for device in one.swap.on_network})
        if devices:
            used = most((one.swap.used_bytes for one in host.facts.values()), 0)
            text = f"swap is on a network ({', '.join(devices)}), {size_words(used)} of it in use"
            yield Problem(ranks=host.ranks, text=text, badness=float(used))


_USED_ABOVE = 0.01
# Single pages are swapped on healthy hosts, too.
_MOVED_ABOVE = 1_000_000


@check(
    after="swap-on-network",
    remedy=(
        "Free memory on this host before training: end what else runs there, lower num_workers, prefetch_factor or the "
        "batch size, load the dataset once per host; then switch swap off and on again (swapoff -a; swapon -a) to get "
        "rid of what is in it."
    ),
)
def swap_in_use(view: JobHosts) -> Iterator[Problem]:
    """Swap space is in use for more than 1 % of the host's memory, or pages were swapped while the check ran.

    Symptom:
        A rank needs minutes for what others do in seconds, with no single line of code to blame.

    Cause:
        More is held in memory than there is, by this job, an earlier one or someone else's.

    Remedy:
        Free memory; hold fewer batches and copies of the dataset.

    Cannot see:
        Whose pages are swapped out.
    """
    for host in view.hosts:
        used = most((one.swap.used_bytes for one in host.facts.values()), 0)
        memory = most((one.capacity.memory_total_bytes for one in host.facts.values()), 0)
        out = most((one.swap.swapped_out_bytes for one in host.facts.values()), 0)
        back = most((one.swap.swapped_in_bytes for one in host.facts.values()), 0)
        words = []
        if memory and used > _USED_ABOVE * memory:
            words.append(f"{size_words(used)} of swap in use on a host with {size_words(memory)} of memory")
        if out + back > _MOVED_ABOVE:
            words.append(f"{size_words(out)} swapped out and {size_words(back)} read back while the check ran")
        if words:
            yield Problem(ranks=host.ranks, text=", ".join(words), badness=float(used + out + back))


_ABOVE = 0.1


@check(
    after="too-few-open-files",
    remedy=(
        "See what else runs on this host (top, iotop) and end it or wait for it; if it is this job itself, start with "
        "fewer workers and load less at once."
    ),
)
def host_under_pressure(view: JobHosts) -> Iterator[Problem]:
    """By the kernel's pressure metrics (PSI), tasks of the host waited for more than a tenth of the check's time.

    Symptom:
        All threads of a rank are slow, even those that only communicate.

    Cause:
        Other work on the host, memory that is short, a disk that is busy.

    Remedy:
        Find out what else runs there.

    Cannot see:
        Who waits for whom; hosts without /proc/pressure; a shortage of cores, because every start keeps them all busy.
    """
    for host in view.hosts:
        shares = {
            "all tasks waited for memory": most((one.swap.memory_stalled for one in host.facts.values()), 0.0),
            "all tasks waited for storage": most((one.swap.io_stalled for one in host.facts.values()), 0.0),
        }
        words = [f"{what} {share:.0%} of the time" for what, share in shares.items() if share > _ABOVE]
        if words:
            yield Problem(ranks=host.ranks, text=", ".join(words), badness=max(shares.values()))
