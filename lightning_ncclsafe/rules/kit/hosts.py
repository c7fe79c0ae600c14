"""Questions that all rules about hosts share: who runs where, who shares what, who is alike."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from lightning_ncclsafe.facts import JobFacts, PreflightFacts
from lightning_ncclsafe.rules.kit.data import Groups, grouped
from lightning_ncclsafe.rules.kit.wording import ranks_words

T = TypeVar("T")
_FEW = 3

Facts = Mapping[int, PreflightFacts]
"""What each of some ranks has found, in ascending order of rank."""


@dataclass(frozen=True, slots=True)
class Host:
    """The ranks that share one machine.

    Attributes:
        facts: What each of them has found.
        names: Each one's host name: containers on one machine have their own.
    """

    facts: Facts
    names: Mapping[int, str]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on it, ascending."""
        return tuple(self.facts)

    def parts(self, ask: Callable[[PreflightFacts], Hashable] = lambda facts: None) -> list[Facts]:
        """Ranks of one container that give one answer: a control group, a mount or a mask that they share."""
        alike: dict[Hashable, dict[int, PreflightFacts]] = defaultdict(dict)
        for rank, facts in self.facts.items():
            alike[self.names[rank], ask(facts)][rank] = facts
        return list(alike.values())


class Checked:
    """What the ranks of a job have found on their hosts.

    Attributes:
        facts: What each rank has found, in ascending order of rank; ranks that did not answer are not in here.
        names: The host name of each of them.
    """

    def __init__(self, job: JobFacts) -> None:
        self.facts: dict[int, PreflightFacts] = {
            one.rank: one.preflight for one in sorted(job.ranks, key=lambda one: one.rank) if one.preflight is not None
        }
        self.names: dict[int, str] = {one.rank: one.host for one in job.ranks}

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The machines, by lowest rank. A rank that does not say where it runs has one of its own."""
        machines = {self.names[rank]: one.capacity.machine for rank, one in self.facts.items() if one.capacity.machine}
        alike: dict[Hashable, dict[int, PreflightFacts]] = defaultdict(dict)
        for rank, facts in self.facts.items():
            name = self.names[rank]
            alike[facts.capacity.machine or machines.get(name) or name or rank][rank] = facts
        return tuple(Host(facts, self.names) for facts in alike.values())

    @property
    def several(self) -> bool:
        """Whether ranks have to reach each other over a network."""
        return len(self.hosts) > 1

    def by(self, ask: Callable[[PreflightFacts], T]) -> Groups[T]:
        """Ranks by what they answer."""
        return grouped({rank: ask(facts) for rank, facts in self.facts.items()})

    def known(self, ask: Callable[[PreflightFacts], T | None]) -> Groups[T]:
        """Ranks by what they answer, those that cannot tell (None, or an empty text) left out."""
        answers = {rank: ask(facts) for rank, facts in self.facts.items()}
        return grouped({rank: value for rank, value in answers.items() if value is not None and value != ""})

    def where(self, ranks: Iterable[int]) -> str:
        """``"ranks 0-7 (node-0)"``, ``"ranks 0-127 (16 hosts)"``."""
        listed = sorted(set(ranks))
        names = list(dict.fromkeys(name for rank in listed if (name := self.names.get(rank, ""))))
        hosts = ", ".join(names) if len(names) <= _FEW else f"{len(names):,} hosts"
        return f"{ranks_words(listed)} ({hosts})" if hosts else ranks_words(listed)


def total(values: Iterable[int | None]) -> int:
    """The sum of those that are known."""
    return sum(value for value in values if value is not None)


def least(values: Iterable[int | None]) -> int | None:
    """The smallest of those that are known."""
    return min((value for value in values if value is not None), default=None)


def most(values: Iterable[T | None], default: T) -> T:
    """The largest of those that are known."""
    return max((value for value in values if value is not None), default=default)  # type: ignore[type-var]


def in_flight_bytes(facts: PreflightFacts) -> int:
    """Memory of the batches that a rank's workers hold ready; 0 where that is not known."""
    return (facts.load.batches_in_flight or 0) * (facts.load.batch_bytes or 0)
