"""How many cores each rank of a host has for itself: masks that overlap are shared, quotas cap."""

from collections import Counter, defaultdict
from collections.abc import Hashable

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit.hosts import Host


def core_pools(host: Host) -> list[tuple[int, ...]]:
    """Ranks that run on the same cores under the same quotas: they share what they have. Unbound ranks are one pool."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for rank, facts in host.facts.items():
        alike[frozenset(_quotas(host, rank)), facts.capacity.cpus].append(rank)
    return [tuple(ranks) for ranks in alike.values()]


def core_shares(host: Host) -> dict[int, float]:
    """Each rank's share of the cores: of every core that it may run on, one part among the ranks that may.

    Its part of each quota of its control group and of those above is the most. Ranks that do not know their cores are
    left out.
    """
    users = Counter(cpu for facts in host.facts.values() for cpu in facts.capacity.cpus)
    members = Counter(group for rank in host.facts for group in _quotas(host, rank))
    shares = {}
    for rank, facts in host.facts.items():
        mask = sum(1 / users[cpu] for cpu in facts.capacity.cpus)
        parts = [quota / members[group] for group, quota in _quotas(host, rank).items()]
        known = [share for share in (mask, *parts) if share > 0]
        if known:
            shares[rank] = min(known)
    return shares


def threads(facts: PreflightFacts, share: float) -> int:
    """Cores' worth of threads that a rank needs besides its workers.

    A pool of threads no larger than the rank's share is what torch and Lightning set by themselves and works in
    bursts; with a GPU it has next to nothing to do. Both count as the main thread alone.
    """
    pool = facts.load.omp_threads or 1
    return 1 if facts.is_cuda or pool <= max(share, 1.0) else pool


def _quotas(host: Host, rank: int) -> dict[Hashable, float]:
    """Quotas by container and group: the paths of groups in two containers may be the same."""
    capacity = host.facts[rank].capacity
    quotas = capacity.quotas or ({capacity.quota_group: capacity.quota_cores} if capacity.quota_cores else {})
    return {(host.names[rank], group): quota for group, quota in quotas.items()}
