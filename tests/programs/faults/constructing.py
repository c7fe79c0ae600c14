"""What constructed recordings are made of: ranks on GPUs and hosts, as NCCL's jobs leave them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from builders import (
    NCCL,
)

from lightning_ncclsafe.facts import (
    GpuFacts,
    GpuStateFacts,
    InterfaceFacts,
    JobFacts,
    RankFacts,
)

GB = 10**9


@dataclass(frozen=True)
class Made:
    """A recording; ranks None where it cannot be said of some that they cause it."""

    causes: tuple[str, ...]
    ranks: tuple[int, ...] | None
    job: Callable[[], JobFacts]


MADE: dict[str, Made] = {}
"""All of them, by name."""


def made(*causes: str, ranks: tuple[int, ...] | None) -> Callable[[Callable[[], JobFacts]], Callable[[], JobFacts]]:
    def add(build: Callable[[], JobFacts]) -> Callable[[], JobFacts]:
        MADE[build.__name__] = Made(causes, ranks, build)
        return build

    return add


def on_gpu(facts: RankFacts, *, busy: bool, power_w: float, xids: tuple[str, ...] = (), used: float = 0.5) -> RankFacts:
    """With what NVML says of an 80 GB device."""
    gpu = GpuFacts(
        index=facts.local_rank,
        name="NVIDIA H100 80GB HBM3",
        uuid=f"GPU-{facts.rank:04}",
        total_bytes=80 * GB,
        free_bytes=int((1 - used) * 80 * GB),
        xids=xids,
    )
    state = GpuStateFacts(gpu=gpu, utilization=1.0 if busy else 0.0, power_w=power_w)
    return replace(facts, machine=replace(facts.machine, gpu=state))


def by_interface(facts: RankFacts, name: str, address: str, *, chosen_by: str = "first that is up") -> RankFacts:
    network = f"{address.rpartition('.')[0]}.0/24"
    others = ("eth0 10.0.0.7",) if name != "eth0" else ()
    found = InterfaceFacts(
        backend="nccl", name=name, address=address, network=network, chosen_by=chosen_by, others=others
    )
    return replace(facts, machine=replace(facts.machine, interface=found))


def at_host(facts: RankFacts, name: str, *, local_rank: int) -> RankFacts:
    return replace(facts, host=name, local_rank=local_rank)


def spinning(rank: int, **more: object) -> RankFacts:
    """A rank whose kernel waits for its peers: fully used, and drawing little."""
    return on_gpu(NCCL.waiting(rank, seq=61, **more), busy=True, power_w=110.0)


def with_pending(facts: RankFacts, *, completed: int, started: int) -> RankFacts:
    """The same calls, of which the device has come so far."""
    calls = tuple(replace(one, completed=one.seq <= completed, started=one.seq <= started) for one in facts.collectives)
    (group,) = facts.groups
    return replace(facts, collectives=calls, groups=(replace(group, last_completed=completed, last_started=started),))
