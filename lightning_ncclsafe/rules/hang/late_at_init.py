"""The cause late-at-init: a rank has not come to where the others wait before the first batch."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import JobFacts, Phase, ProcessFacts, RankFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.rules.activity import Kind, deepest_user_frame
from lightning_ncclsafe.rules.memory import memory_evidence, memory_words, swaps
from lightning_ncclsafe.rules.sentences import (
    how_we_know,
    location,
    place_words,
    severity,
    standing,
    while_others_wait,
)
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, location_of, ranks_words, size_words, verb

_OTHER_RULES = (Kind.LOADER, Kind.LOGGER, Kind.CHECKPOINT, Kind.FINISHED)
_ALIVE = ("running", "sleeping", "disk-sleep")
_REMEDY = (
    "Do this work once and ahead of the job (a separate script that leaves its result on disk), or in prepare_data, "
    "for which Lightning lets the other ranks wait without limit."
)
_REMEDY_SWAP = (
    "This host has too little memory: load the dataset lazily or memory-mapped instead of whole in every rank, use a "
    "smaller batch or fewer loader workers, and keep swap off network storage."
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
        What a process does that has not yet created its Trainer, beyond its state and memory.
    """
    view = timeline(job)
    late = tuple(rank for rank in view.working(view.stragglers) if _is_late(view, rank))
    if late and view.waiting:
        yield _finding(view, late)
    unborn = tuple(rank for rank in view.silent if _is_unborn(view, rank))
    if unborn:
        yield _unborn(view, unborn)


def _is_late(view: Timeline, rank: int) -> bool:
    return view.facts[rank].progress.phase is Phase.INIT and view.activities[rank].kind not in _OTHER_RULES


def _is_unborn(view: Timeline, rank: int) -> bool:
    """The others wait in ``init_process_group``, which no rank leaves before all have come."""
    process = view.witnesses.get(rank)
    alive = process is None or (process.state in _ALIVE and not process.gil_held)
    return alive and any(_waits_in_init(facts) for facts in view.facts.values())


def _waits_in_init(facts: RankFacts) -> bool:
    return any(action.name == "init_process_group" for action in facts.progress.actions)


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    swapping = any(swaps(view.facts[rank].host_facts) for rank in ranks)
    held = "; its host is swapping" if swapping else ""
    memory = memory_words(view.facts[ranks[0]].host_facts)
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'is', 'are')} late: still {standing(view, ranks[0])}"
        f"{f', {memory}' if memory else ''}{held}{while_others_wait(view, ranks)}."
    )
    amounts = (item for rank in ranks[:8] for item in memory_evidence(view.facts[rank]))
    return Finding(
        rule="late-at-init",
        severity=severity(view.job),
        confidence=Confidence.LIKELY,
        summary=capitalised(text),
        ranks=ranks,
        location=location(view, ranks),
        evidence=(*amounts, *how_we_know(view, ranks)),
        remedy=_REMEDY_SWAP if swapping else _REMEDY,
    )


def _unborn(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    seen = [process for rank in ranks if (process := view.witnesses.get(rank))]
    frame = next((frame for process in seen if (frame := deepest_user_frame(process.stack))), None)
    swapping = any(process.swap_bytes or process.state == "disk-sleep" for process in seen)
    at = f", and {verb(ranks, 'is', 'are')} {place_words(frame)}" if frame else ""
    text = f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} not joined the process group{at}"
    return Finding(
        rule="late-at-init",
        severity=severity(view.job),
        confidence=Confidence.LIKELY if seen else Confidence.POSSIBLE,
        summary=capitalised(f"{text}{while_others_wait(view, ranks)}."),
        ranks=ranks,
        location=location_of(frame),
        evidence=tuple(_evidence(view, seen)),
        remedy=_REMEDY_SWAP if swapping else f"{_REMEDY} Check also that every rank's process has been started.",
    )


def _evidence(view: Timeline, processes: Iterable[ProcessFacts]) -> Iterator[Evidence]:
    for process in processes:
        words = [f"Process {process.pid} is {process.state}"]
        words += [f"waits in {process.wait_channel}"] if process.wait_channel else []
        words += [f"{size_words(process.rss_bytes)} resident"] if process.rss_bytes is not None else []
        words += [f"{size_words(process.swap_bytes)} swapped out"] if process.swap_bytes else []
        yield Evidence(source="process", rank=process.rank, text=", ".join(words) + ".")
    waiting = tuple(rank for rank, facts in view.facts.items() if _waits_in_init(facts))
    text = f"{ranks_words(waiting)} {verb(waiting, 'is', 'are')} in init_process_group."
    yield Evidence(source="phase", text=capitalised(text))
