"""What a rank caught, or lost a thread to, before it stood still: said beside what the findings say of that rank."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from lightning_ncclsafe.code.libraries import PROCESSES, WAITS_FOR_THREADS
from lightning_ncclsafe.facts import CaughtException, Frame, IncidentKind, JobFacts, RankFacts
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.rules.kit.activity import deepest_user_frame, hook_words, is_in, trainer_start
from lightning_ncclsafe.rules.kit.overruns import aborted
from lightning_ncclsafe.rules.kit.rule import Rule, once
from lightning_ncclsafe.rules.kit.timeline import Timeline, timeline
from lightning_ncclsafe.rules.kit.wording import condition_words, duration_words, joined, location_of, short_location

# What came as often belongs to how the code works: it is told, and explains nothing.
_USUAL = 8
# What is older has been lived with for a while.
_BEFORE_S = 60.0
_MOMENTS_S = 10.0
# A queue's, a pool's or a lock's frames below the line that waits.
_INNER = 4
_LISTED = 4
_REMEDY_THREAD = (
    "Correct the {error}, and report it to whoever waits: catch it in the thread and put it into the queue, use a "
    "concurrent.futures executor, whose result() raises it, or wait with a timeout and check the thread."
)
_OF_LIVE_RANKS = (IncidentKind.SUSPECT, IncidentKind.EXCEPTION, IncidentKind.TIMEOUT, IncidentKind.INSPECTED)


def caught_by(view: Timeline, rank: int) -> tuple[CaughtException, ...]:
    """What this rank has caught shortly before it stood still, or since, and most others have not; the last one first.

    What has ended its other threads is among it.
    """
    facts = view.facts.get(rank)
    found = [one for one in facts.caught if is_recent(one, facts) and _is_its_own(view, rank, one)] if facts else []
    return tuple(sorted(found, key=lambda one: (not one.is_held, one.ago_s)))


def held_by(view: Timeline, ranks: Iterable[int]) -> dict[int, CaughtException]:
    """Those of these ranks that still handle an exception of their own, in the block that has caught it, with that."""
    held = {rank: next((one for one in caught_by(view, rank) if one.is_held), None) for rank in ranks}
    return {rank: one for rank, one in held.items() if one is not None and not one.is_consequence}


def missed_thread(facts: RankFacts) -> CaughtException | None:
    """What has ended another thread of a rank that waits for one; the last one, and None where that is long ago."""
    ended = (one for one in facts.caught if one.thread and is_recent(one, facts))
    return min(ended, key=lambda one: one.ago_s, default=None) if waits_for_thread(facts) else None


def remedy_of_thread(facts: RankFacts) -> str:
    """What to do about a thread that has ended, of a rank that waits for one; empty where none has."""
    ended = missed_thread(facts)
    return _REMEDY_THREAD.format(error=ended.type) if ended is not None else ""


def waits_for_thread(facts: RankFacts) -> bool:
    """Whether a rank's main thread waits for another thread of its own, be it in vain or not."""
    inner = facts.stack[-_INNER:]
    # In a pool's frames it waits for its processes, or for threads that hand on what they raise.
    return is_in(WAITS_FOR_THREADS, inner) and not is_in(PROCESSES, inner)


def has_gone_on(view: Timeline, ranks: Iterable[int]) -> tuple[int, ...]:
    """Those of these ranks that have caught an exception, so that they may have left something out."""
    return tuple(rank for rank in ranks if any(not one.thread and _is_rare(one) for one in caught_by(view, rank)))


def skips_handled(view: Timeline, ranks: Iterable[int]) -> tuple[tuple[int, ...], Frame | None]:
    """Those of these ranks that stand beyond a line where others wait, in a ``try`` whose exceptions are caught.

    Also gives that line. Nothing says that an exception was raised; but without one they would have come there, too.
    A rank that is gone may be among those others, by what it has written last.
    """
    asked = tuple(ranks)
    inside = {rank: frame for rank in asked if (frame := _handled(view, rank)) is not None}
    beyond = tuple(rank for rank in asked if rank not in inside and rank in view.facts)
    if not inside or not beyond or len({(frame.file, frame.handler) for frame in inside.values()}) > 1:
        return (), None
    return beyond, next(iter(inside.values()))


@once
def past_aborted(view: Timeline) -> tuple[int, ...]:
    """Ranks that have caught an exception moments before gloo has ended another: they may have left out its call."""
    gone_on = has_gone_on(view, sorted(view.facts)) if aborted(view) else ()
    return tuple(rank for rank in gone_on if _is_moments_ago(view, rank))


def _is_moments_ago(view: Timeline, rank: int) -> bool:
    idle_s = view.facts[rank].progress.idle_s
    # That a connection broke is what follows.
    own = (one for one in caught_by(view, rank) if not (one.thread or one.is_consequence))
    return any(one.ago_s <= idle_s + _MOMENTS_S and _is_rare(one) for one in own)


def raised_at(one: CaughtException) -> Frame | None:
    """The deepest line in the user's code at which it was raised."""
    return deepest_user_frame(one.stack)


def error_words(one: CaughtException) -> str:
    """``"OSError: No space left on device"``."""
    return f"{one.type}: {one.message.rstrip('.')}" if one.message else one.type


def with_caught(findings: Iterable[tuple[Rule[Any], Finding]], job: JobFacts) -> list[Finding]:
    """The same findings; those about ranks that have caught something say so, the first one in its summary, too."""
    if job.incident.kind not in _OF_LIVE_RANKS:
        return [finding for _, finding in findings]
    view = timeline(job)
    told: list[Finding] = []
    for index, (rule, finding) in enumerate(findings):
        found = [(rank, one) for rank in _asked(view, rule, finding) for one in caught_by(view, rank)][:_LISTED]
        evidence = tuple(Evidence(source="exception", rank=rank, text=_sentence(one, "It")) for rank, one in found)
        news = (_sentence(one, f"Rank {rank}") for rank, one in found if _is_rare(one) and not _is_told(one, finding))
        summary = joined((finding.summary, next(news, ""))) if index == 0 else finding.summary
        waits = (remedy_of_thread(view.facts[rank]) for rank in finding.ranks if rank in view.facts)
        remedy = next(filter(None, waits), finding.remedy) if index == 0 else finding.remedy
        told.append(replace(finding, summary=summary, evidence=(*finding.evidence, *evidence), remedy=remedy))
    return told


def _asked(view: Timeline, rule: Rule[Any], finding: Finding) -> Iterator[int]:
    """The first of those that a finding names, and those that may have diverged from them.

    Where they are gone, those that have survived what may have ended them.
    """
    yield from finding.ranks[:_LISTED]
    if rule.is_mutual:
        yield from itertools.islice((rank for rank in sorted(view.facts) if rank not in finding.ranks), _LISTED)
    elif finding.ranks and set(finding.ranks) <= set(view.silent):
        survived = (rank for rank, facts in sorted(view.facts.items()) if any(map(_is_of_call_before, facts.caught)))
        yield from itertools.islice(survived, _LISTED)


def _is_of_call_before(one: CaughtException) -> bool:
    return one.passed.startswith("Trainer.")


def _is_told(one: CaughtException, finding: Finding) -> bool:
    return error_words(one) in finding.summary


def _sentence(one: CaughtException, who: str) -> str:
    at = _at(one)
    ago = f", {duration_words(one.ago_s)} before this report"
    if one.thread:
        whose = "its" if who == "It" else f"{who}'s"
        return f"{whose[:1].upper()}{whose[1:]} thread {one.thread!r} ended with {error_words(one)}{at}{ago}."
    out_of = _out_of(one)
    if one.is_held:
        return f"{who} is {held_words(one)}."
    times = f" {one.count} times" if one.count > 1 else ""
    though = ", although the guard ends the others when one rank raises" if _is_of_call_before(one) else ""
    return f"{who} caught {error_words(one)}{out_of}{at}{times}{ago}, and continued{though}."


def held_words(one: CaughtException) -> str:
    """``"in the `except` block (line 7) that caught OSError: No space left on device, raised at train.py:5"``."""
    within = f" (line {one.caught_at.line})" if one.caught_at is not None else ""
    raised = f", raised{_at(one)}" if raised_at(one) is not None else ""
    return f"in the `except` block{within} that caught {error_words(one)}{_out_of(one)}{raised}"


def _at(one: CaughtException) -> str:
    frame = raised_at(one)
    return f" at {short_location(frame)}" if frame is not None else ""


def _out_of(one: CaughtException) -> str:
    return f" out of {hook_words(one.passed)}" if one.passed else ""


def is_recent(one: CaughtException, facts: RankFacts) -> bool:
    """Whether it came shortly before its rank stood still, or since."""
    return one.is_held or _is_of_call_before(one) or one.ago_s <= facts.progress.idle_s + _BEFORE_S


def _is_rare(one: CaughtException) -> bool:
    return one.is_held or one.count < _USUAL


def _is_its_own(view: Timeline, rank: int, one: CaughtException) -> bool:
    """Whether most others have nothing like it: what all ranks do alike lets none of them diverge."""
    others = len(view.facts) - 1
    return one.is_held or not others or 2 * (_ranks_by_kind(view)[_kind(one)] - 1) < others


@once
def _ranks_by_kind(view: Timeline) -> Counter[tuple[str, str]]:
    """On how many ranks each kind of exception was caught."""
    return Counter(kind for facts in view.facts.values() for kind in {*map(_kind, facts.caught)})


def _kind(one: CaughtException) -> tuple[str, str]:
    return one.type, location_of(raised_at(one))


def _handled(view: Timeline, rank: int) -> Frame | None:
    """The innermost frame of the user's own, below the Trainer, within a ``try`` whose exceptions are caught."""
    facts, witness = view.facts.get(rank), view.witnesses.get(rank)
    stack = witness.stack if facts is None and witness is not None else ()
    if facts is not None:
        stack = facts.exception.stack if facts.exception is not None else facts.stack
    inside = stack[trainer_start(stack) :]
    return next((frame for frame in reversed(inside) if frame.user and frame.handler), None)


def skipped_words(frame: Frame, others: str) -> str:
    """What an exception may have left out, as nothing has told of one.

    Args:
        frame: The line within the ``try``.
        others: Who has come there, and what they do, ``"rank 0 waits"``.
    """
    return (
        f"The line {short_location(frame)}, where {others}, is in a `try`: an exception there is caught by "
        f"{condition_words(frame.handler)}, and the rest of it is skipped."
    )
