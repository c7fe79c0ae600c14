"""Ranks that have not joined the process group, as the others see them that wait for them there."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from lightning_ncclsafe.facts import ProcessFacts, RankFacts
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.rules.kit.activity import deepest_user_frame
from lightning_ncclsafe.rules.kit.memory import memory_clause, memory_remedy, memory_words, used_up_words
from lightning_ncclsafe.rules.kit.sentences import place_words, severity
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wait_channels import Wait, wait_of
from lightning_ncclsafe.rules.kit.wording import capitalised, location_of, ranks_words, verb

_REMEDY_NOT_STARTED = "Check also that every rank's process has been started, and its own output."
_LISTED = 8
_ALIVE = ("running", "sleeping", "disk-sleep")


def waits_in_init(facts: RankFacts) -> bool:
    """Whether a rank waits for all others to join."""
    return any(action.name == "init_process_group" for action in facts.progress.actions)


def is_unborn(view: Timeline, rank: int) -> bool:
    """Whether a silent rank has not come to its Trainer yet, as far as is known, and is at work.

    The others wait in ``init_process_group``, which no rank leaves before all have come; or they have called the
    Trainer once more, and it is outside of it.
    """
    process = view.witnesses.get(rank)
    may_work = process is None or (process.state in _ALIVE and not process.gil_held and not _is_held(process))
    return may_work and (view.awaits_joining or rank in view.job.absent)


def _is_held(process: ProcessFacts) -> bool:
    """Its control group is frozen, or it waits for storage on a network, where that is not what it swaps to."""
    wait = wait_of(process.wait_channel)
    return wait is Wait.FREEZER or (wait is Wait.NETWORK_STORAGE and not process.swap_bytes)


def not_joined(view: Timeline, ranks: tuple[int, ...], remedy: str) -> Finding:
    """The finding late-at-init of ranks that have not come to their Trainer yet.

    Args:
        view: The job.
        ranks: Those ranks.
        remedy: What to do, unless it is their memory.
    """
    seen = [process for rank in ranks if (process := view.witnesses.get(rank))]
    frame = next((frame for process in seen if (frame := deepest_user_frame(process.stack))), None)
    swapping = any(process.swap_bytes or process.state == "disk-sleep" for process in seen)
    at = f", and {verb(ranks, 'is', 'are')} {place_words(frame)}" if frame else ""
    told = memory_clause(memory_words(seen[0]), _used_up_before_joining(view, seen)) if seen else ""
    text = f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} not joined the process group{at}{told}"
    remedy = memory_remedy(swapping, seen) or remedy
    return Finding(
        rule="late-at-init",
        severity=severity(view.job),
        confidence=Confidence.LIKELY if seen else Confidence.POSSIBLE,
        summary=capitalised(f"{text}, while {_waiting_words(view, verb(ranks, 'it', 'them'))}."),
        ranks=ranks,
        location=location_of(frame),
        evidence=tuple(_evidence(view, ranks, seen)),
        remedy=remedy if frame else f"{remedy} {_REMEDY_NOT_STARTED}",
    )


def _used_up_before_joining(view: Timeline, seen: Sequence[ProcessFacts]) -> str:
    firsts = sorted({facts.rank - facts.local_rank for facts in view.facts.values()})
    host = bisect_right(firsts, seen[0].rank)
    if host == 0:
        return ""
    # Ranks of a host follow one another.
    first = firsts[host - 1]
    witness = next(facts for facts in view.facts.values() if facts.rank - facts.local_rank == first)
    answering = [facts.host_facts for facts in view.facts.values() if facts.host == witness.host]
    silent = [process for process in seen if bisect_right(firsts, process.rank) == host]
    return used_up_words(witness.host_facts, [*answering, *silent])


def _waiting_words(view: Timeline, whom: str) -> str:
    waiting = tuple(rank for rank, facts in view.facts.items() if waits_in_init(facts))
    return f"{ranks_words(waiting)} {verb(waiting, 'waits', 'wait')} for {whom} in init_process_group"


def _evidence(view: Timeline, ranks: Sequence[int], processes: Sequence[ProcessFacts]) -> Iterator[Evidence]:
    for process in processes[:_LISTED]:
        words = [f"Process {process.pid} is {process.state}"]
        words += [f"waits in {process.wait_channel}"] if process.wait_channel else []
        memory = memory_words(process).removeprefix("with ")
        yield Evidence(source="process", rank=process.rank, text=", ".join([*words, *filter(None, [memory])]) + ".")
        frame = deepest_user_frame(process.stack)
        if frame is not None:
            code = f": {frame.code}" if frame.code else ""
            yield Evidence(source="stack", rank=process.rank, text=f"Is at {location_of(frame)}{code}")
    unseen = tuple(sorted(set(ranks) - {process.rank for process in processes}))
    if unseen:
        text = (
            f"No process of {ranks_words(unseen)} could be seen from where the others wait: it has not been started, "
        )
        yield Evidence(source="process", text=text + "has ended, or is on a host on which no rank waits.")
    yield Evidence(source="phase", text=capitalised(_waiting_words(view, ranks_words(ranks))) + ".")
