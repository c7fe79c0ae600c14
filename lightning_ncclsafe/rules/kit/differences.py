"""The parts that findings about presented data are built of: who has what, and how we know."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.rules.kit.data import Differences, Groups, JobLoader
from lightning_ncclsafe.rules.kit.wording import capitalised, ranks_words

T = TypeVar("T")
_LISTED = 4
_EVIDENCE = 8


def value_words(value: object) -> str:
    """A value as its owner writes it: ``"1234"``, ``"none"``, ``"Subset of ImageFolder"``, ``"DistributedSampler"``."""
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return " of ".join(map(value_words, value))
    return str(value)


def spread(groups: Groups[T], words: Callable[[T], str] = value_words) -> str:
    """``"20 on ranks 0-2, 22 on rank 3"``; many values are cut and counted."""
    listed = [f"{words(value)} on {ranks_words(ranks)}" for value, ranks in groups.parts[:_LISTED]]
    more = len(groups.parts) - _LISTED
    return ", ".join([*listed, *([f"{more:,} more values on other ranks"] if more > 0 else [])])


def counted(unit: str) -> Callable[[int | None], str]:
    """Words of a number in this unit: ``"1,250 batches"``."""
    many = f"{unit}es" if unit.endswith("h") else f"{unit}s"
    return lambda count: f"no {many}" if count is None else f"{count:,} {unit if count == 1 else many}"


def told(groups: Groups[T], words: Callable[[T], str] = value_words) -> tuple[Evidence, ...]:
    """One line for each value and the ranks that have it."""
    return tuple(
        Evidence(
            source="loader",
            rank=ranks[0] if len(ranks) == 1 else None,
            text=f"{capitalised(ranks_words(ranks))}: {words(value)}.",
        )
        for value, ranks in groups.parts[:_EVIDENCE]
    )


def differing_words(found: Differences) -> str:
    """``"batch_size is 32 on ranks 0-2, 16 on rank 3; drop_last is …"``."""
    return "; ".join(f"{name} is {spread(groups)}" for name, groups in found.items())


def differing_evidence(found: Differences) -> tuple[Evidence, ...]:
    """One line for each attribute, value and the ranks that have it."""
    return tuple(
        item
        for name, groups in found.items()
        for item in told(groups, lambda value, name=name: f"{name} {value_words(value)}")  # type: ignore[misc]
    )


def deviating(groups: Iterable[Groups[T]]) -> tuple[int, ...]:
    """The ranks that deviate in any of these, ascending."""
    return tuple(sorted({rank for group in groups for rank in group.deviating}))


def batches_words(loader: JobLoader) -> str:
    """What a difference leads to, as a sentence: the different numbers of batches; empty where these are equal."""
    if not loader.batches.differ:
        return ""
    return f"The numbers of batches differ with that: {spread(loader.batches, counted('batch'))}."
