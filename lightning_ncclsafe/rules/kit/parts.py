"""Ranks by what they have in common, and which of them deviate."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from lightning_ncclsafe.facts.findings import Evidence

_T = TypeVar("_T")


def ranks_by(values: Mapping[int, _T]) -> dict[_T, tuple[int, ...]]:
    """The ranks with each value, both in the order in which they are given by rank."""
    alike: dict[_T, list[int]] = defaultdict(list)
    for rank, value in values.items():
        alike[value].append(rank)
    return {value: tuple(ranks) for value, ranks in alike.items()}


def evidence_about(ranks: Sequence[int], source: str, text: str) -> Evidence:
    """Evidence that these ranks have in common; a rank's own if there is only one."""
    return Evidence(source=source, rank=ranks[0] if len(ranks) == 1 else None, text=text)


def minority(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The ranks that are not in the largest of these parts, ascending; empty if no part is larger than all others."""
    largest, *others = sorted(parts, key=len, reverse=True) or [()]
    is_larger = not others or len(others[0]) < len(largest)
    return tuple(sorted(chain.from_iterable(others))) if is_larger else ()


@dataclass(frozen=True, slots=True)
class Groups(Generic[_T]):
    """Ranks grouped by one value of each.

    Attributes:
        parts: Each value with its ranks, ascending: the most frequent value first, then by lowest rank.
    """

    parts: tuple[tuple[_T, tuple[int, ...]], ...]

    @property
    def differ(self) -> bool:
        """Whether there is more than one value."""
        return len(self.parts) > 1

    @property
    def deviating(self) -> tuple[int, ...]:
        """The ranks whose value is not that of more than half; all of them if there is no such majority."""
        counts = [len(ranks) for _, ranks in self.parts]
        first = 1 if counts and 2 * counts[0] > sum(counts) else 0
        return tuple(sorted(rank for _, ranks in self.parts[first:] for rank in ranks))


def grouped(values: Mapping[int, _T]) -> Groups[_T]:
    """Ranks by value; the ranks have to come in ascending order."""
    return Groups(tuple(sorted(ranks_by(values).items(), key=lambda part: (-len(part[1]), part[1]))))


def deviating(groups: Iterable[Groups[_T]]) -> tuple[int, ...]:
    """The ranks that deviate in any of these groupings, ascending."""
    return tuple(sorted({rank for group in groups for rank in group.deviating}))
