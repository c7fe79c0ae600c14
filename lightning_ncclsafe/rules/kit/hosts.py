"""The view that preflight checks read: which rank runs on which host, and what ranks found there before training."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from lightning_ncclsafe.facts import JobFacts, PreflightFacts
from lightning_ncclsafe.facts.wording import ranks_words
from lightning_ncclsafe.rules.kit.parts import Groups, grouped
from lightning_ncclsafe.rules.kit.rule import Rules, View

_T = TypeVar("_T")
_FEW = 3

PreflightByRank = Mapping[int, PreflightFacts]
"""What some ranks have found, in ascending order of rank."""


@dataclass(frozen=True, slots=True)
class Host:
    """The ranks that share one machine.

    Attributes:
        facts: What each of them has found.
        names: The host name of each rank: containers on one machine have their own.
    """

    facts: PreflightByRank
    names: Mapping[int, str]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on it, ascending."""
        return tuple(self.facts)

    def parts(self, ask: Callable[[PreflightFacts], Hashable] = lambda facts: None) -> list[PreflightByRank]:
        """The ranks of each container, grouped by a value: a control group, a mount or a mask that they share."""
        alike: dict[Hashable, dict[int, PreflightFacts]] = defaultdict(dict)
        for rank, facts in self.facts.items():
            alike[self.names[rank], ask(facts)][rank] = facts
        return list(alike.values())

    def quotas(self, rank: int) -> dict[Hashable, float]:
        """A rank's quotas of cores by container and control group; two containers may have groups of one path."""
        capacity = self.facts[rank].capacity
        quotas = capacity.quotas or ({capacity.quota_group: capacity.quota_cores} if capacity.quota_cores else {})
        return {(self.names[rank], group): quota for group, quota in quotas.items()}

    def core_shares(self) -> dict[int, float]:
        """Each rank's share of the cores: every core is divided among the ranks that may run on it.

        A share is at most the rank's part of each quota of its control group and of the groups above. Ranks whose cores
        are unknown are left out.
        """
        users = Counter(cpu for facts in self.facts.values() for cpu in facts.capacity.cpus)
        members = Counter(group for rank in self.facts for group in self.quotas(rank))
        shares = {}
        for rank, facts in self.facts.items():
            mask = sum(1 / users[cpu] for cpu in facts.capacity.cpus)
            parts = [quota / members[group] for group, quota in self.quotas(rank).items()]
            known = [share for share in (mask, *parts) if share > 0]
            if known:
                shares[rank] = min(known)
        return shares


class JobHosts(View):
    """What the ranks of a job have found on their hosts.

    Attributes:
        facts: What each rank has found, in ascending order of rank; ranks that did not answer are not in here.
        names: The host name of each of them.
    """

    def __init__(self, job: JobFacts) -> None:
        super().__init__(job)
        self.facts: dict[int, PreflightFacts] = {
            one.rank: one.preflight for one in sorted(job.ranks, key=lambda one: one.rank) if one.preflight is not None
        }
        self.names: dict[int, str] = {one.rank: one.host for one in job.ranks}

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The machines, by lowest rank. A rank whose machine is unknown counts as one of its own."""
        machines = {self.names[rank]: one.capacity.machine for rank, one in self.facts.items() if one.capacity.machine}
        alike: dict[Hashable, dict[int, PreflightFacts]] = defaultdict(dict)
        for rank, facts in self.facts.items():
            name = self.names[rank]
            alike[facts.capacity.machine or machines.get(name) or name or rank][rank] = facts
        return tuple(Host(facts, self.names) for facts in alike.values())

    @property
    def several(self) -> bool:
        """Whether there are several hosts, so that ranks have to reach each other over a network."""
        return len(self.hosts) > 1

    def by(self, ask: Callable[[PreflightFacts], _T]) -> Groups[_T]:
        """Ranks grouped by a value of what they found."""
        return grouped({rank: ask(facts) for rank, facts in self.facts.items()})

    def known(self, ask: Callable[[PreflightFacts], _T | None]) -> Groups[_T]:
        """The same without ranks whose value is unknown (None or empty)."""
        answers = {rank: ask(facts) for rank, facts in self.facts.items()}
        return grouped({rank: value for rank, value in answers.items() if value is not None and value != ""})

    def where(self, ranks: Iterable[int]) -> str:
        """``"ranks 0-7 (node-0)"``, ``"ranks 0-127 (16 hosts)"``."""
        listed = sorted(set(ranks))
        names = list(dict.fromkeys(name for rank in listed if (name := self.names.get(rank, ""))))
        hosts = ", ".join(names) if len(names) <= _FEW else f"{len(names):,} hosts"
        return f"{ranks_words(listed)} ({hosts})" if hosts else ranks_words(listed)


WHAT_HOSTS_LACK = Rules(JobHosts)
preflight_rule = WHAT_HOSTS_LACK.rule


def total(values: Iterable[int | None]) -> int:
    """The sum of those that are known."""
    return sum(value for value in values if value is not None)


def least(values: Iterable[int | None]) -> int | None:
    """The smallest of those that are known."""
    return min((value for value in values if value is not None), default=None)


def most(values: Iterable[_T | None], default: _T) -> _T:
    """The largest of those that are known."""
    return max((value for value in values if value is not None), default=default)  # type: ignore[type-var]


def in_flight_bytes(facts: PreflightFacts) -> int:
    """Memory of the batches that a rank's workers hold ready; 0 if unknown."""
    return (facts.load.batches_in_flight or 0) * (facts.load.batch_bytes or 0)
