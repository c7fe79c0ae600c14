"""What ranks present of their data: who presents what, who deviates, and in which words that is told."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from lightning_ncclsafe.facts import DataFacts, JobFacts, LoaderFacts
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.kit.rule import View
from lightning_ncclsafe.rules.kit.wording import capitalised, ranks_words

_T = TypeVar("_T")
_X = TypeVar("_X")

TRAIN = "train_dataloader"
"""The stage in which ranks train."""

PREDICT = "predict_dataloader"
"""The stage in which ranks predict."""

_EVALUATION = ("val_dataloader", "test_dataloader")

CONTENTS = {"paths", "values", "items"}
"""The kinds of fingerprints that are equal only where the data is; ``"paths"`` between ranks of one host."""

TELLING = ("indices", "files", "batches", "values", "names", "counts")
"""The kinds of fingerprints that are equal wherever the data is, also where another host keeps it elsewhere."""


@dataclass(frozen=True, slots=True)
class Groups(Generic[_T]):
    """Ranks by what they answer to one question.

    Attributes:
        parts: Each answer with the ranks that give it, ascending: the most frequent answer first, then by lowest rank.
    """

    parts: tuple[tuple[_T, tuple[int, ...]], ...]

    @property
    def differ(self) -> bool:
        """Whether there is more than one answer."""
        return len(self.parts) > 1

    @property
    def deviating(self) -> tuple[int, ...]:
        """The ranks that answer otherwise than more than half do; all of them where there is no such majority."""
        counts = [len(ranks) for _, ranks in self.parts]
        first = 1 if counts and 2 * counts[0] > sum(counts) else 0
        return tuple(sorted(rank for _, ranks in self.parts[first:] for rank in ranks))


def grouped(values: Mapping[int, _T]) -> Groups[_T]:
    """Ranks by value; the ranks have to come in ascending order."""
    alike: dict[_T, list[int]] = defaultdict(list)
    for rank, value in values.items():
        alike[value].append(rank)
    parts = ((value, tuple(ranks)) for value, ranks in alike.items())
    return Groups(tuple(sorted(parts, key=lambda part: (-len(part[1]), part[1]))))


Questions = Mapping[str, Callable[[_X], object]]
Differences = dict[str, Groups[object]]


def differences(values: Mapping[int, _X], questions: Questions[_X]) -> Differences:
    """The questions, by their names, to which ranks answer differently."""
    answers = {name: grouped({rank: ask(value) for rank, value in values.items()}) for name, ask in questions.items()}
    return {name: groups for name, groups in answers.items() if groups.differ}


def goes_alone(data: DataFacts) -> bool:
    """Whether each rank goes through the stage for itself, so that ranks may have different numbers of batches.

    Lightning calls no collective per batch where it does not train. A step of the user's may, which nobody knows before
    it hangs: only who has asked for a comparison, or for a policy, is not trusted to evaluate uneven data.
    """
    if data.stage == PREDICT:
        return not data.forward_communicates
    return evaluates_alone(data) and _all_have_some(data)


def evaluates_alone(data: DataFacts) -> bool:
    """Whether ranks may evaluate different numbers of batches, as long as they call no collective meanwhile."""
    is_default = data.on_mismatch == "raise_on_hang" and data.on_uneven == "raise"
    return data.stage in _EVALUATION and is_default and not data.forward_communicates


def _all_have_some(data: DataFacts) -> bool:
    """Whether all lengths are known; of one that is 0 Lightning has this rank alone raise an error."""
    return all(loader.length for loader in data.loaders)


class JobLoader:
    """One position among the loaders of a stage, as all ranks present it.

    Attributes:
        index: The position, from 0.
        data: What each rank presents.
        facts: What each rank presents there.
    """

    def __init__(self, index: int, data: dict[int, DataFacts]) -> None:
        self.index = index
        self.data = data
        self.facts = {rank: one.loaders[index] for rank, one in data.items()}

    def by(self, ask: Callable[[LoaderFacts], _T]) -> Groups[_T]:
        """Ranks by what this loader's facts answer."""
        return grouped({rank: ask(facts) for rank, facts in self.facts.items()})

    @cached_property
    def name(self) -> str:
        """Where Lightning has it from, as most ranks call it."""
        return self.by(lambda facts: facts.name).parts[0][0] or f"loader {self.index}"

    @cached_property
    def split(self) -> bool:
        """Whether a sampler splits the data among ranks."""
        samplers = (facts.sampler for facts in self.facts.values())
        return any(sampler is not None and (sampler.replicas or 1) > 1 for sampler in samplers)

    @cached_property
    def replicated(self) -> bool:
        """Whether all ranks must hold the same data, as a sampler splits it among them; else ranks have their own."""
        return self.split and not self._split_in_groups

    @cached_property
    def split_among_fewer(self) -> bool:
        """Whether samplers split the data among fewer replicas than there are ranks that read data."""
        return all(0 < self._replicas(rank) < data.data_ranks for rank, data in self.data.items())

    @cached_property
    def _split_in_groups(self) -> bool:
        """Whether groups of ranks, those of a host for instance, have data of their own and split it completely."""
        if not self.split_among_fewer:
            return False
        groups = self.by(self._told)
        return groups.differ and all(self._takes_each_share_once(ranks) for _, ranks in groups.parts)

    def _replicas(self, rank: int) -> int:
        sampler = self.facts[rank].sampler
        return (sampler.replicas or 0) if sampler is not None else 0

    def _told(self, facts: LoaderFacts) -> tuple[object, ...]:
        """What tells data apart; samples may differ by their augmentation and are asked where nothing else is known."""
        kinds = [kind for kind in self.kinds if kind in TELLING] or [kind for kind in self.kinds if kind == "items"]
        return facts.samples, *(facts.fingerprints[kind] for kind in kinds)

    def _takes_each_share_once(self, ranks: tuple[int, ...]) -> bool:
        taken = {(self.data[rank].data_rank, sampler.rank) for rank in ranks if (sampler := self.facts[rank].sampler)}
        return sorted(share or 0 for _, share in taken) == list(range(self._replicas(ranks[0])))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of fingerprints that all ranks have."""
        return tuple(sorted(set.intersection(*(set(facts.fingerprints) for facts in self.facts.values()))))

    @cached_property
    def batches(self) -> Groups[int | None]:
        """Ranks by number of batches."""
        return self.by(lambda facts: facts.batches)

    @cached_property
    def samples(self) -> Groups[int | None]:
        """Ranks by number of samples."""
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
    """What the number of batches of an epoch depends on, by the way in which Lightning combines a stage's loaders."""
    counts = [loader.batches for loader in data.loaders]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or data.mode not in _TOTALS:
        return tuple(counts)
    return _TOTALS[data.mode](known, default=0)


class JobData(View):
    """What the ranks of a job present before one stage. A job of one rank has nothing to compare and presents nothing.

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
        """Ranks by what their data answers."""
        return grouped({rank: ask(data) for rank, data in self.data.items()})

    @cached_property
    def stages(self) -> Groups[str]:
        """Ranks by stage."""
        return self.by(lambda data: data.stage)

    @property
    def stage(self) -> str:
        """The stage that most ranks are about to start; empty where nothing is presented."""
        return next((stage for stage, _ in self.stages.parts), "")

    @cached_property
    def goes_alone(self) -> bool:
        """Whether each rank goes through the stage for itself, so that ranks may have different numbers of batches."""
        return all(map(goes_alone, self.data.values()))

    @cached_property
    def loaders(self) -> tuple[JobLoader, ...]:
        """The positions that all ranks have; none where they are about to start different stages."""
        if self.stages.differ:
            return ()
        count = min((len(data.loaders) for data in self.data.values()), default=0)
        return tuple(JobLoader(index, self.data) for index in range(count))

    @cached_property
    def policy(self) -> str:
        """What the user has set for uneven data; that ranks raise where they do not agree on it."""
        set_ = self.by(lambda data: data.on_uneven)
        return "raise" if set_.differ else set_.parts[0][0]


_LISTED = 4
_EVIDENCE = 8


def value_words(value: object) -> str:
    """A value as its owner writes it: ``"1234"``, ``"none"``, ``"Subset of ImageFolder"``, ``"DistributedSampler"``."""
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple):
        return " of ".join(map(value_words, value))
    return str(value)


def spread(groups: Groups[_T], words: Callable[[_T], str] = value_words) -> str:
    """``"20 on ranks 0-2, 22 on rank 3"``; many values are cut and counted."""
    listed = [f"{words(value)} on {ranks_words(ranks)}" for value, ranks in groups.parts[:_LISTED]]
    more = len(groups.parts) - _LISTED
    return ", ".join([*listed, *([f"{more:,} more values on other ranks"] if more > 0 else [])])


def counted(unit: str) -> Callable[[int | None], str]:
    """Words of a number in this unit: ``"1,250 batches"``."""
    many = f"{unit}es" if unit.endswith("h") else f"{unit}s"
    return lambda count: f"no {many}" if count is None else f"{count:,} {unit if count == 1 else many}"


def told(groups: Groups[_T], words: Callable[[_T], str] = value_words) -> tuple[Evidence, ...]:
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


def deviating(groups: Iterable[Groups[_T]]) -> tuple[int, ...]:
    """The ranks that deviate in any of these, ascending."""
    return tuple(sorted({rank for group in groups for rank in group.deviating}))


def batches_words(loader: JobLoader) -> str:
    """What a difference leads to, as a sentence: the different numbers of batches; empty where these are equal."""
    if not loader.batches.differ:
        return ""
    return f"The numbers of batches differ with that: {spread(loader.batches, counted('batch'))}."


def disagreement(
    ranks: tuple[int, ...],
    summary: str,
    *,
    evidence: Iterable[Evidence],
    severity: Severity = Severity.ERROR,
    confidence: Confidence = Confidence.CERTAIN,
    remedy: str = "",
) -> Finding:
    """What a rule about data has found; its name, and its remedy where that is always the same, are those it declares.

    Args:
        ranks: The ranks that deviate.
        summary: The answer, in sentences; its first letter becomes a capital one.
        evidence: How we know.
        severity: How bad it is for the run.
        confidence: How sure this is.
        remedy: What to do, where that depends on what was found.
    """
    return Finding(
        rule="",
        severity=severity,
        confidence=confidence,
        summary=capitalised(summary),
        ranks=ranks,
        evidence=tuple(evidence),
        remedy=remedy,
    )
