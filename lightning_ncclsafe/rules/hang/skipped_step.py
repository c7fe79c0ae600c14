"""The cause skipped-step: a rank left out the backward pass of a batch, in which its peers wait for it."""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import JobFacts, RankFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.divergences import alone_in_trainer
from lightning_ncclsafe.rules.sentences import exception_place, how_we_know, severity, standing, while_others_wait
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, location_of, ranks_words, verb
from lightning_ncclsafe.step_facts import StepFacts

_REFUSED = "Skipping the `training_step`"
_LISTED = 8
_OTHERS = 3
_REMEDY = (
    "Let all ranks skip a batch or none: agree on it first (reduce a flag over all ranks and skip where any has it "
    "set), or go through the backward pass with a loss of 0 times the model's output, so that the gradients of a bad "
    "batch are 0."
)
_REMEDY_PASSES = (
    "Make the same backward passes on all ranks in every batch: decide from the batch's index whether an optimizer has "
    "its turn, or agree on it first; go through a pass whose loss is of no use with 0 times the loss. What was trained "
    "since that batch has mixed gradients: resume from a checkpoint before it."
)
_REMEDY_STEPS = (
    "Let all ranks make an optimizer's step in the same batches: decide from the batch's index, or agree on it first. "
    "This alone lets nobody wait; look at what else the same condition decides."
)
_MADE = ("backward passes", "backward passes that reduce nothing")


def skipped_step(job: JobFacts) -> Iterable[Finding]:
    """One rank left out a backward pass of a batch, or one of several, and so exchanged no gradients for it.

    Symptom:
        Peers wait in the gradients' all-reduce; the rank is in a later batch, or Lightning has refused to go on
        ("Skipping the `training_step` by returning None in distributed training is not supported").

    Cause:
        "return None" for a batch without labels, with a loss that is not finite, or after an out-of-memory error; with
        manual optimization, a turn of one optimizer (a GAN's generator) that one rank leaves out, or gradients that
        ranks accumulate over different numbers of batches.

    Remedy:
        Skip on all ranks or on none.

    Cannot see:
        A backward pass that is called as loss.backward() instead of self.manual_backward(loss); which of several
        returns it was.
    """
    view = timeline(job)
    refused = tuple(rank for rank in view.raised if _is_refused(view.facts[rank]))
    if refused:
        yield _finding(view, refused, Confidence.CERTAIN)
    elif view.waiting and not view.raised and not any(alone_in_trainer(view)):
        skipped = _skipped_more(view)
        other = _other_counts(view)
        if skipped:
            yield _finding(view, skipped, Confidence.LIKELY)
        elif other is not None:
            yield _counts_finding(view, other)


class _Counts(NamedTuple):
    """What ranks have made in a batch.

    Attributes:
        batch: Its epoch and index.
        kind: Of what: backward passes, those that reduce nothing, steps of the first optimizer, ….
        by_rank: How many; without ranks that may make more.
    """

    batch: tuple[int, ...]
    kind: int
    by_rank: dict[int, int]

    @property
    def what(self) -> str:
        """``"backward passes"``."""
        if self.kind >= len(_MADE):
            return f"steps of optimizer {self.kind - len(_MADE)}"
        return _MADE[self.kind]


def _other_counts(view: Timeline) -> _Counts | None:
    """The first batch in which ranks have made different numbers of something, and of what first."""
    steps = {rank: facts.steps for rank, facts in sorted(view.facts.items())}
    if len(steps) < 2 or not all(known.passes or known.under_way for known in steps.values()):
        return None
    since = max((known.passes or (known.under_way,))[0][:2] for known in steps.values())
    changes = {run[:2] for known in steps.values() for run in known.passes} | {since}
    changes |= {known.under_way[:2] for known in steps.values() if known.under_way}
    for batch in sorted(change for change in changes if change >= since):
        made = {rank: _made_in(known, batch) for rank, known in steps.items()}
        for index in range(max(len(counts) for counts, _ in made.values())):
            counts = {rank: _count(found, index) for rank, (found, _) in made.items()}
            most = max(counts.values())
            # Of a batch under way more may come.
            fewer = [rank for rank, (_, is_over) in made.items() if is_over and counts[rank] < most]
            if fewer:
                told = {rank: count for rank, count in counts.items() if made[rank][1] or count == most}
                return _Counts(batch, index, told)
        if not all(is_over for _, is_over in made.values()):
            return None
    return None


def _made_in(steps: StepFacts, batch: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """What a rank has made in a batch, and whether that is all of it."""
    if batch > (steps.passes_epoch, steps.passes_batch):
        return (steps.under_way[2:] if steps.under_way[:2] == batch else ()), False
    return next((run[2:] for run in reversed(steps.passes) if run[:2] <= batch), ()), True


def _count(made: tuple[int, ...], index: int) -> int:
    return made[index] if index < len(made) else 0


def _counts_finding(view: Timeline, found: _Counts) -> Finding:
    by_count: dict[int, list[int]] = {}
    for rank, count in found.by_rank.items():
        by_count.setdefault(count, []).append(rank)
    # The few; of as many, those that made fewer.
    fewest = min(by_count, key=lambda count: (len(by_count[count]), count))
    ranks = tuple(by_count[fewest])
    made = ", ".join(f"{count} on {ranks_words(who)}" for count, who in sorted(by_count.items()))
    at = f"batch {found.batch[1]} of epoch {found.batch[0]}"
    # Ranks need one another for what a step is made of, and not for the step.
    are_exchanged = found.kind < len(_MADE)
    so = "so that since then the gradients of different passes have been reduced together"
    if not are_exchanged:
        so = "so that their weights are not the same any more"
    text = (
        f"Ranks have made different numbers of {found.what} in {at} ({made}), {so}; {ranks_words(ranks)} "
        f"{verb(ranks, 'is', 'are')} now {standing(view, ranks[0])}{while_others_wait(view, ranks)}."
    )
    places = view.facts[ranks[0]].steps.passes_at
    return Finding(
        rule="skipped-step",
        severity=severity(view.job),
        confidence=Confidence.LIKELY if are_exchanged else Confidence.POSSIBLE,
        summary=text,
        ranks=ranks,
        location=places[0] if len(places) == 1 else "",
        evidence=(
            Evidence(source="steps", text=f"{capitalised(found.what)} in {at}: {made}."),
            *how_we_know(view, ranks),
        ),
        remedy=_REMEDY_PASSES if are_exchanged else _REMEDY_STEPS,
    )


def _is_refused(facts: RankFacts) -> bool:
    return facts.exception is not None and facts.exception.message.startswith(_REFUSED)


def _skipped_more(view: Timeline) -> tuple[int, ...]:
    """Ranks that have left out more backward passes than others; none where nothing tells of these passes."""
    steps = {rank: facts.steps for rank, facts in sorted(view.facts.items())}
    if not steps or not all(known.with_backward for known in steps.values()):
        return ()
    # A rank that is some batches ahead may have skipped as many more as all do.
    least = min(steps.values(), key=lambda known: (known.skipped, -known.with_backward))
    return tuple(rank for rank, known in steps.items() if known.skipped - least.skipped > max(_ahead(known, least), 0))


def _ahead(steps: StepFacts, of: StepFacts) -> int:
    return steps.with_backward + steps.skipped - of.with_backward - of.skipped


def _finding(view: Timeline, ranks: tuple[int, ...], confidence: Confidence) -> Finding:
    facts = view.facts[ranks[0]]
    steps = facts.steps
    batch = f"batch {steps.skipped_batch} of epoch {steps.skipped_epoch}" if steps.skipped_batch >= 0 else "a batch"
    raised = f", which Lightning refuses with several ranks ({facts.exception.type})" if facts.exception else ""
    stands = "" if raised else f", and {verb(ranks, 'is', 'are')} now {standing(view, ranks[0])}"
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} skipped {batch}: its training_step returned without a "
        f"backward pass{_at(facts)}{raised}{stands}{while_others_wait(view, ranks)}."
    )
    return Finding(
        rule="skipped-step",
        severity=Severity.ERROR if raised else severity(view.job),
        confidence=confidence,
        summary=capitalised(text),
        ranks=ranks,
        location=steps.returns_nothing[0] if steps.returns_nothing else location_of(exception_place(facts)),
        evidence=(*_evidence(view, ranks), *how_we_know(view, ranks)),
        remedy=_REMEDY,
    )


def _at(facts: RankFacts) -> str:
    places = facts.steps.returns_nothing
    return f" (its only line that returns nothing is {_line(places[0])})" if len(places) == 1 else ""


def _line(place: str) -> str:
    return place.replace("\\", "/").rpartition("/")[2]


def _evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    others = (rank for rank in sorted(view.facts) if rank not in set(ranks))
    for rank in [*ranks[:_LISTED], *itertools.islice(others, _OTHERS)]:
        facts = view.facts[rank]
        steps, raised = facts.steps, facts.exception
        text = f"{steps.with_backward} batches had a backward pass, {steps.skipped} had none."
        yield Evidence(source="steps", rank=rank, text=text)
        if raised is not None and not raised.is_consequence:
            yield Evidence(source="exception", rank=rank, text=f"{raised.type}: {raised.message}")
        if steps.skipped and steps.returns_nothing:
            text = f"Returns nothing at {', '.join(map(_line, steps.returns_nothing[:_LISTED]))}."
            yield Evidence(source="source code", rank=rank, text=text)
