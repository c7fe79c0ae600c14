"""The view that agreement rules read: what each rank presents about its data, which ranks deviate, and in words."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TypeVar

from lightning_ncclsafe.facts import DataFacts, JobFacts, LoaderFacts, RoundedArray, RoundedValues
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.facts.wording import apart_words, capitalised, counted, plural, ranks_words
from lightning_ncclsafe.rules.kit.parts import Groups, evidence_about, grouped
from lightning_ncclsafe.rules.kit.rule import Rules, View

_T = TypeVar("_T")
_X = TypeVar("_X")

TRAIN = "train_dataloader"
"""The name of the stage for training."""

_PREDICT = "predict_dataloader"
"""The name of the stage for prediction."""

_EVALUATION = ("val_dataloader", "test_dataloader")

CONTENTS = {"paths", "values", "items"}
"""The kinds of fingerprints that are equal only if the data is; ``"paths"`` only between ranks of one host."""

# The kinds of fingerprints that are equal whenever the data is, even if another host keeps it elsewhere.
_EQUAL_FOR_COPIES = ("indices", "files", "batches", "values", "names", "counts")


Questions = Mapping[str, Callable[[_X], object]]
Differences = dict[str, Groups[object]]


def differences(values: Mapping[int, _X], questions: Questions[_X]) -> Differences:
    """The questions to which ranks have different answers, by name, with the ranks grouped by answer."""
    answers = {name: grouped({rank: ask(value) for rank, value in values.items()}) for name, ask in questions.items()}
    return {name: groups for name, groups in answers.items() if groups.differ}


def runs_independently(data: DataFacts) -> bool:
    """Whether each rank runs the stage independently, so that ranks may have different numbers of batches.

    Lightning calls no collective per batch except in training. The user's step may, which is unknown until it hangs: so
    users who set ``on_mismatch`` or ``on_uneven`` get uneven evaluation data reported, others do not.
    """
    if data.stage == _PREDICT:
        return not data.forward_communicates
    return evaluates_independently(data) and _all_have_some(data)


def evaluates_independently(data: DataFacts) -> bool:
    """Whether ranks may evaluate different numbers of batches, as long as they call no collective in between."""
    is_default = data.on_mismatch == "raise_on_hang" and data.on_uneven == "raise"
    return data.stage in _EVALUATION and is_default and not data.forward_communicates


def _all_have_some(data: DataFacts) -> bool:
    """Whether all lengths are known and none is 0, for which Lightning raises an error on this rank alone."""
    return all(loader.length for loader in data.loaders)


# Every rank may have a shard of its own: each is compared with so many others of the same shape.
_MOST_COMPARED = 64


def _rounded_alike(prints: dict[int, str], rounded: Mapping[int, RoundedValues | None]) -> dict[int, str]:
    """The fingerprints of ranks; that of the first one for all whose values differ from its own by rounding only."""
    first: dict[str, str] = {}
    by_rest: dict[str, list[tuple[str, RoundedValues]]] = defaultdict(list)
    for rank, own in prints.items():
        values = rounded[rank]
        if own in first or values is None:
            continue
        known = by_rest[values.rest]
        first[own] = next((other for other, of_other in known if _are_near(of_other, values)), own)
        if first[own] == own and len(known) < _MOST_COMPARED:
            known.append((own, values))
    return {rank: first.get(own, own) for rank, own in prints.items()}


def _are_near(one: RoundedValues, other: RoundedValues) -> bool:
    """Whether two ranks that differ in nothing else have the same arrays but for rounding."""
    return len(one.arrays) == len(other.arrays) and all(map(_is_array_near, one.arrays, other.arrays))


def _is_array_near(one: RoundedArray, other: RoundedArray) -> bool:
    each = (one.numbers, one.bounds, other.numbers, other.bounds)
    if len({*map(len, each)}) > 1:
        return False
    return all(abs(a - b) <= max(of_a, of_b) for a, of_a, b, of_b in zip(*each, strict=True))


class JobLoader:
    """One position among the loaders of a stage, as all ranks present it.

    Attributes:
        index: The position, from 0.
        data: What each rank presents about the stage.
        facts: What each rank presents at this position.
    """

    def __init__(self, index: int, data: dict[int, DataFacts]) -> None:
        self.index = index
        self.data = data
        self.facts = {rank: one.loaders[index] for rank, one in data.items()}
        self._prints: dict[str, dict[int, str]] = {}

    def by(self, ask: Callable[[LoaderFacts], _T]) -> Groups[_T]:
        """Ranks grouped by a value of this loader's facts."""
        return grouped({rank: ask(facts) for rank, facts in self.facts.items()})

    @cached_property
    def name(self) -> str:
        """Its name in Lightning, as on most ranks."""
        return self.by(lambda facts: facts.name).parts[0][0] or f"loader {self.index}"

    @cached_property
    def split(self) -> bool:
        """Whether a sampler splits the data among ranks."""
        samplers = (facts.sampler for facts in self.facts.values())
        return any(sampler is not None and (sampler.replicas or 1) > 1 for sampler in samplers)

    @cached_property
    def replicated(self) -> bool:
        """Whether all ranks must hold the same data because a sampler splits it; otherwise each has its own."""
        return self.split and not self._split_in_groups

    @cached_property
    def split_among_fewer(self) -> bool:
        """Whether samplers split the data among fewer replicas than there are ranks that read data."""
        return all(0 < self._replicas(rank) < data.data_ranks for rank, data in self.data.items())

    @cached_property
    def _split_in_groups(self) -> bool:
        """Whether groups of ranks, such as those of a host, each have their own data and split it completely."""
        if not self.split_among_fewer:
            return False
        groups = grouped(self._identities)
        return groups.differ and all(self._takes_each_share_once(ranks) for _, ranks in groups.parts)

    def _replicas(self, rank: int) -> int:
        sampler = self.facts[rank].sampler
        return (sampler.replicas or 0) if sampler is not None else 0

    def prints(self, kind: str) -> dict[int, str]:
        """The fingerprints of a kind, by rank; equal ones for ranks whose values differ by rounding only."""
        if kind not in self._prints:
            own = {rank: facts.fingerprints[kind] for rank, facts in self.facts.items()}
            rounded = {rank: facts.rounded for rank, facts in self.facts.items()}
            self._prints[kind] = _rounded_alike(own, rounded) if kind == "values" else own
        return self._prints[kind]

    @cached_property
    def _identities(self) -> dict[int, tuple[object, ...]]:
        """What distinguishes data; samples, which augmentation changes, count only if nothing else is known."""
        kinds = [kind for kind in self.kinds if kind in _EQUAL_FOR_COPIES] or [
            kind for kind in self.kinds if kind == "items"
        ]
        prints = [self.prints(kind) for kind in kinds]
        return {rank: (facts.samples, *(each[rank] for each in prints)) for rank, facts in self.facts.items()}

    def _takes_each_share_once(self, ranks: tuple[int, ...]) -> bool:
        taken = {(self.data[rank].data_rank, sampler.rank) for rank in ranks if (sampler := self.facts[rank].sampler)}
        return sorted(share or 0 for _, share in taken) == list(range(self._replicas(ranks[0])))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of fingerprints that all ranks have."""
        return tuple(sorted(set.intersection(*(set(facts.fingerprints) for facts in self.facts.values()))))

    @cached_property
    def batches(self) -> Groups[int | None]:
        """Ranks grouped by number of batches."""
        return self.by(lambda facts: facts.batches)

    @cached_property
    def samples(self) -> Groups[int | None]:
        """Ranks grouped by number of samples."""
        return self.by(lambda facts: facts.samples)

    @cached_property
    def half_sized(self) -> bool:
        """Whether only some ranks know the length."""
        return self.by(lambda facts: facts.length is None).differ

    @cached_property
    def unequal_samples(self) -> bool:
        """Whether data that must be the same on all ranks has different numbers of samples."""
        known = all(samples is not None for samples, _ in self.samples.parts)
        return self.replicated and known and self.samples.differ


_TOTALS = {"max_size_cycle": max, "max_size": max, "min_size": min}


def epoch_batches(data: DataFacts) -> object:
    """The number of batches of an epoch, as Lightning combines a stage's loaders; all numbers if that is unknown."""
    counts = [loader.batches for loader in data.loaders]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or data.mode not in _TOTALS:
        return tuple(counts)
    return _TOTALS[data.mode](known, default=0)


class JobData(View):
    """What the ranks of a job present before one stage; nothing for a job of one rank, which has nothing to compare.

    Attributes:
        data: What each rank presents, in ascending order of rank.
        silent: Ranks that presented nothing while others did.
        hosts: The host of each rank.
    """

    def __init__(self, job: JobFacts) -> None:
        super().__init__(job)
        several = job.ranks if job.world_size > 1 else ()
        self.data: dict[int, DataFacts] = {facts.rank: facts.data for facts in several if facts.data is not None}
        self.silent: tuple[int, ...] = job.silent if self.data else ()
        self.hosts: dict[int, str] = {facts.rank: facts.host for facts in several}

    def by(self, ask: Callable[[DataFacts], _T]) -> Groups[_T]:
        """Ranks grouped by a value of their data."""
        return grouped({rank: ask(data) for rank, data in self.data.items()})

    @cached_property
    def stages(self) -> Groups[str]:
        """Ranks grouped by stage."""
        return self.by(lambda data: data.stage)

    @property
    def stage(self) -> str:
        """The stage that most ranks are about to start; empty if nothing is presented."""
        return next((stage for stage, _ in self.stages.parts), "")

    @cached_property
    def runs_independently(self) -> bool:
        """Whether each rank runs the stage independently, so that ranks may have different numbers of batches."""
        return all(map(runs_independently, self.data.values()))

    @cached_property
    def loaders(self) -> tuple[JobLoader, ...]:
        """The positions that all ranks have; empty if ranks are about to start different stages."""
        if self.stages.differ:
            return ()
        count = min((len(data.loaders) for data in self.data.values()), default=0)
        return tuple(JobLoader(index, self.data) for index in range(count))

    @cached_property
    def policy(self) -> str:
        """The user's setting ``on_uneven``; ``"raise"`` if it differs between ranks."""
        policies = self.by(lambda data: data.on_uneven)
        return "raise" if policies.differ else policies.parts[0][0]


HOW_DATA_DIFFERS = Rules(JobData)
agreement_rule = HOW_DATA_DIFFERS.rule

_LISTED = 4
_EVIDENCE = 8


def value_words(value: object) -> str:
    """A value as its owner would write it: ``"1234"``, ``"none"``, ``"Subset of ImageFolder"``."""
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return " of ".join(map(value_words, value))
    return str(value)


def spread_words(groups: Groups[_T], words: Callable[[_T], str] = value_words) -> str:
    """``"20 on ranks 0-2 but 22 on rank 3"``; a long list is cut and counted."""
    listed = [f"{words(value)} on {ranks_words(ranks)}" for value, ranks in groups.parts[:_LISTED]]
    more = len(groups.parts) - _LISTED
    return apart_words([*listed, *([f"{more:,} more values on other ranks"] if more > 0 else [])])


def count_words(unit: str) -> Callable[[int | None], str]:
    """A function that writes a number in this unit: ``"1,250 batches"``."""
    return lambda count: f"no {plural(unit)}" if count is None else counted(count, unit)


def value_evidence(groups: Groups[_T], words: Callable[[_T], str] = value_words) -> tuple[Evidence, ...]:
    """One line for each value, with its ranks."""
    return tuple(
        evidence_about(ranks, "loader", f"{capitalised(ranks_words(ranks))}: {words(value)}.")
        for value, ranks in groups.parts[:_EVIDENCE]
    )


def differing_words(differing: Differences) -> str:
    """``"batch_size is 32 on ranks 0-2 but 16 on rank 3; drop_last is …"``."""
    return "; ".join(f"{name} is {spread_words(groups)}" for name, groups in differing.items())


def differing_evidence(differing: Differences) -> tuple[Evidence, ...]:
    """One line for each attribute and value, with its ranks."""
    return tuple(
        item
        for name, groups in differing.items()
        for item in value_evidence(groups, lambda value, name=name: f"{name} {value_words(value)}")  # type: ignore[misc]
    )


def batches_words(loader: JobLoader) -> str:
    """That the numbers of batches differ as well, as a sentence; empty if they are equal."""
    if not loader.batches.differ:
        return ""
    return f"The numbers of batches differ with that: {spread_words(loader.batches, count_words('batch'))}."


def disagreement(
    ranks: tuple[int, ...],
    summary: str,
    *,
    evidence: Iterable[Evidence],
    severity: Severity = Severity.ERROR,
    confidence: Confidence = Confidence.CERTAIN,
    remedy: str = "",
    location: str = "",
) -> Finding:
    """Builds an agreement rule's finding; the rule's name, and its remedy if none is given, come from the declaration.

    Args:
        ranks: The ranks that deviate.
        summary: The answer, in sentences; its first letter becomes a capital one.
        evidence: How we know.
        severity: How bad it is for the run.
        confidence: How sure this is.
        remedy: What to do, if that depends on the facts.
        location: The user's line; if it is empty, the line that makes the data is found later.
    """
    return Finding(
        rule="",
        location=location,
        severity=severity,
        confidence=confidence,
        summary=capitalised(summary),
        ranks=ranks,
        evidence=tuple(evidence),
        remedy=remedy,
    )
