"""The cause late-at-init: a rank has not come to where the others wait before the first batch."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.rules.kit.activity import Kind
from lightning_ncclsafe.rules.kit.divergences import alone_in_trainer
from lightning_ncclsafe.rules.kit.memory import (
    memory_clause,
    memory_evidence,
    memory_remedy,
    memory_words,
    swaps,
    used_up_words,
)
from lightning_ncclsafe.rules.kit.not_joined import is_unborn, not_joined
from lightning_ncclsafe.rules.kit.positions import begins
from lightning_ncclsafe.rules.kit.sentences import how_we_know, location, severity, standing, while_others_wait
from lightning_ncclsafe.rules.kit.timeline import Timeline, timeline
from lightning_ncclsafe.rules.kit.wording import capitalised, ranks_words, verb

_OTHER_RULES = (Kind.LOADER, Kind.LOGGER, Kind.CHECKPOINT, Kind.FINISHED)
_REMEDY = (
    "Do this work once and ahead of the job (a separate script that leaves its result on disk), or in prepare_data, "
    "for which Lightning lets the other ranks wait without limit."
)
_REMEDY_OUTSIDE = (
    "Look at what stands before this call of the Trainer, above all under a condition on the rank: what is done there "
    "takes time, and trainer.save_checkpoint, barriers and gathers have to be called by all ranks."
)


def late_at_init(job: JobFacts) -> Iterable[Finding]:
    """A rank has not reached the first collective or barrier while the others wait there.

    Symptom:
        Nothing happens after the start; the others report a store or socket timeout, or wait in a barrier of setup.

    Cause:
        One rank prepares data, downloads, compiles or swaps for longer than the others wait.

    Remedy:
        Prepare ahead of the job or in prepare_data; where the host swaps, need less memory in each rank.

    Cannot see:
        What a process does that has not come as far as to import this package, beyond its state and memory; one on a
        host on which no rank waits.
    """
    view = timeline(job)
    late = tuple(rank for rank in view.working(view.stragglers) if _is_late(view, rank))
    if late and view.waiting:
        yield _finding(view, late)
    unborn = tuple(rank for rank in view.silent if is_unborn(view, rank))
    if unborn and view.awaits_joining:
        yield not_joined(view, unborn, _REMEDY)
    elif unborn and view.waiting and not any(alone_in_trainer(view)):
        yield _outside(view, unborn)


def _is_late(view: Timeline, rank: int) -> bool:
    return begins(view.facts[rank].progress) and view.activities[rank].kind not in _OTHER_RULES


def _outside(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """No guard is there that would say what they do: it may be work, or a collective that waits for the others."""
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} not come to this call of the Trainer: "
        f"{verb(ranks, 'it is', 'they are')} still in the program's own code before it, at work or in a collective "
        f"that the others do not call{while_others_wait(view, ranks)}."
    )
    known = f"The process group is there, and {ranks_words(ranks)} {verb(ranks, 'has', 'have')} not begun to watch."
    return Finding(
        rule="late-at-init",
        severity=severity(view.job),
        confidence=Confidence.POSSIBLE,
        summary=capitalised(text),
        ranks=ranks,
        evidence=(Evidence(source="process", text=known), *how_we_know(view, ())),
        remedy=_REMEDY_OUTSIDE,
    )


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    swapping = any(swaps(view.facts[rank].host_facts) for rank in ranks)
    processes = [other.host_facts for other in view.facts.values() if other.host == facts.host]
    told = memory_clause(
        memory_words(facts.host_facts),
        "its host is swapping" if swapping else "",
        used_up_words(facts.host_facts, processes),
    )
    summary = f"{ranks_words(ranks)} {verb(ranks, 'is', 'are')} late: still {standing(view, ranks[0])}{told}"
    amounts = (item for rank in ranks[:8] for item in memory_evidence(view.facts[rank]))
    return Finding(
        rule="late-at-init",
        severity=severity(view.job),
        confidence=Confidence.LIKELY,
        summary=capitalised(f"{summary}{while_others_wait(view, ranks)}."),
        ranks=ranks,
        location=location(view, ranks),
        evidence=(*amounts, *how_we_know(view, ranks)),
        remedy=memory_remedy(swapping, [view.facts[rank].host_facts for rank in ranks]) or _REMEDY,
    )
