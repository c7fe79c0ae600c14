"""Ranks that do not present their data, present other loaders than the others, or cannot read theirs."""

from collections import defaultdict
from collections.abc import Iterator

from lightning_ncclsafe.facts import DataFacts, JobFacts, LoaderFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Evidence,
    Finding,
    Groups,
    Hangs,
    JobData,
    JobLoader,
    Plan,
    Questions,
    Severity,
    agreement_rule,
    deviating,
    differences,
    differing_evidence,
    disagreement,
    grouped,
    joined,
    ranks_words,
    short_place,
    spread_words,
    value_evidence,
    value_words,
    verb,
)


@agreement_rule(
    after="loader-count",
    remedy=(
        "Look at this rank's own output: it failed, is still preparing its data, or took a different path from "
        "the others. Call the same methods of the Trainer on all ranks, and leave slow preparation to prepare_data, so "
        "that all ranks come to their loaders at about the same time."
    ),
)
def unpresented_loader(view: JobData) -> Iterator[Finding]:
    """Some ranks presented their loaders and others never did.

    Symptom:
        The ranks that did would wait in their first collective until it times out.

    Cause:
        A rank failed, was killed, reads or tokenises data alone, or never called this stage.

    Remedy:
        Look at the rank's own output; let all ranks call the same stages.

    Cannot see:
        What the rank does instead; a report about the hang shows that.
    """
    if view.silent:
        others, silent = tuple(view.data), view.silent
        text = (
            f"{ranks_words(silent)} never presented {verb(silent, 'its', 'their')} {view.stage}, "
            f"{ranks_words(others)} did."
        )
        yield disagreement(silent, text, evidence=_evidence(view.job, others))


def _evidence(job: JobFacts, others: tuple[int, ...]) -> Iterator[Evidence]:
    yield Evidence(source="loader", text=f"{len(others):,} of {job.world_size:,} ranks presented their loaders.")
    for process in job.witnessed[:LISTED]:
        yield Evidence(source="process", rank=process.rank, text=f"Process {process.pid} is {process.state}.")


_QUESTIONS: Questions[DataFacts] = {
    "stage": lambda data: data.stage,
    "number of loaders": lambda data: len(data.loaders),
    "mode": lambda data: data.mode,
}


@agreement_rule(
    after="different-trainer-settings",
    remedy=(
        "Return the same loaders in the same order and mode from the hook on every rank, an empty one where a rank has "
        "no data, and call the Trainer's methods in the same order on all ranks; look for a condition on the rank "
        "around them."
    ),
    plan=Plan.STOP,
    hangs=Hangs.AT_ONCE,
    is_of_data=True,
)
def loader_count(view: JobData) -> Iterator[Finding]:
    """Ranks present different numbers of loaders, loaders of different stages, or combine them differently.

    Symptom:
        The run hangs when one rank begins its second validation loader, or as soon as two ranks are in two stages.

    Cause:
        A condition on the rank around a loader or a call of the Trainer, files that exist on some hosts only.

    Remedy:
        Return the same loaders in the same order and mode on every rank.

    Cannot see:
        Loaders that the user's own code creates and iterates by itself.
    """
    differing = differences(view.data, _QUESTIONS)
    if differing:
        what, groups = next(iter(differing.items()))
        about = "" if what == "stage" else f" in {view.stage}"
        yield disagreement(
            deviating(differing.values()),
            f"Ranks have different loaders to go through; the {what}{about} is {spread_words(groups)}.",
            evidence=differing_evidence(differing),
        )


@agreement_rule(
    after="unpresented-loader",
    remedy=(
        "Use the same class of dataset and loader on all ranks, and give it __len__ on all of them or on none. An "
        "empty shard needs the same class as a full one."
    ),
    plan=Plan.STOP,
    hangs=Hangs.IF_UNEVEN,
    is_of_data=True,
)
def sized_and_unsized(view: JobData) -> Iterator[Finding]:
    """A loader has a length on some ranks and none on others.

    Symptom:
        All ranks hang before the first batch: Lightning sums the lengths, and ranks without one do not take part.

    Cause:
        An IterableDataset on some ranks and a map-style one on others, or a __len__ that raises TypeError on some.

    Remedy:
        Give the loader a length on all ranks or on none.

    Cannot see:
        Whether a given length is correct.
    """
    for loader in view.loaders:
        readable = {rank: facts for rank, facts in loader.facts.items() if not _has_failed(facts)}
        if grouped({rank: facts.length is None for rank, facts in readable.items()}).differ:
            yield _half_sized(loader)


def _has_failed(facts: LoaderFacts) -> bool:
    """Whether asking for the length raised, which is a finding of its own."""
    return any(is_of_length(text) for text in facts.problems)


def _half_sized(loader: JobLoader) -> Finding:
    groups = loader.by(lambda facts: ("no length" if facts.length is None else "a length", facts.dataset))
    sized = loader.by(lambda facts: facts.length is None)
    raised = {rank: facts.no_length_at for rank, facts in loader.facts.items() if facts.no_length_at}
    place = next(iter(raised.values())) if len({*raised.values()}) == 1 else ""
    text = f"The {loader.name} has a length on some ranks only: {spread_words(groups, _words)}."
    return disagreement(
        sized.deviating,
        joined((text, f"On {ranks_words(raised)}, it raises at {short_place(place)}." if place else "")),
        evidence=value_evidence(groups, _words),
        location=place,
    )


def _words(value: tuple[str, str]) -> str:
    sized, dataset = value
    return f"{sized} ({value_words(dataset)})" if dataset else sized


_OF_LENGTH = "len(loader)"
_REMEDY = (
    "Fix what the sentence describes, so that this loader can be compared; without it the comparison is incomplete."
)
_REMEDY_LENGTH = (
    "Fix the loader's __len__: Lightning calls it too, and a rank on which it raises leaves the others waiting."
)


@agreement_rule(after="same-shard", hangs=Hangs.LATER)
def unreadable_loader(view: JobData) -> Iterator[Finding]:
    """Something about a loader could not be determined on some rank.

    Symptom:
        A loader's length, sampler or samples raise an error when they are asked for.

    Cause:
        A file that is missing on one host, a __len__ or __getitem__ that fails, an attribute that is a property.

    Remedy:
        Fix what the finding quotes.

    Cannot see:
        Whether what could not be compared is identical on all ranks.
    """
    for name, by_length in _problems(view).items():
        for of_length in (True, False):
            if by_length[of_length]:
                yield _finding(name, grouped(by_length[of_length]), of_length)


def is_of_length(problem: str) -> bool:
    """Whether this problem is that reading the loader's length failed."""
    return problem.startswith(_OF_LENGTH)


def _problems(view: JobData) -> dict[str, dict[bool, dict[int, str]]]:
    """Problems by loader, by whether they are about its length, and by rank; several of one rank are joined."""
    problems: dict[str, dict[bool, dict[int, str]]] = defaultdict(lambda: {True: {}, False: {}})
    for rank, data in view.data.items():
        for index, loader in enumerate(data.loaders):
            for of_length in (True, False):
                texts = [text for text in loader.problems if is_of_length(text) is of_length]
                if texts:
                    problems[loader.name or f"loader {index}"][of_length][rank] = " ".join(map(_sentence, texts))
    return problems


def _sentence(text: str) -> str:
    return text if text.rstrip().endswith(".") else f"{text.rstrip()}."


def _finding(name: str, groups: Groups[str], of_length: bool) -> Finding:
    text, ranks = groups.parts[0]
    others = len(groups.parts) - 1
    more = (
        f"{others:,} more such {'sentence is' if others == 1 else 'sentences are'} in the evidence." if others else ""
    )
    return disagreement(
        tuple(sorted(rank for _, alike in groups.parts for rank in alike)),
        joined((f"The {name} could not be read in full on {ranks_words(ranks)}: {text}", more)),
        severity=Severity.ERROR if of_length else Severity.WARNING,
        evidence=value_evidence(groups, lambda sentence: sentence.rstrip().removesuffix(".")),
        remedy=_REMEDY_LENGTH if of_length else _REMEDY,
    )
