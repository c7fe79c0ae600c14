"""Exceptions that did not end a rank but may explain what it does: caught by its code, or ending another thread."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from lightning_ncclsafe.code.libraries import PROCESSES, WAITS_FOR_THREADS
from lightning_ncclsafe.facts import CaughtException, Decides, Frame, IncidentKind, JobFacts, RankFacts
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.facts.wording import (
    at_words,
    condition_words,
    duration_words,
    joined,
    location_of,
    short_location,
)
from lightning_ncclsafe.rules.kit.activity import hook_words
from lightning_ncclsafe.rules.kit.exception_messages import error_words
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame, inside_trainer, is_in
from lightning_ncclsafe.rules.kit.gloo_aborts import aborted_by_gloo
from lightning_ncclsafe.rules.kit.rule import Rule, once
from lightning_ncclsafe.rules.kit.timeline import Timeline, stack_of, timeline

# An exception that was raised this often is part of how the code works: it is listed, but explains nothing.
_USUAL = 8
# The rank has made progress since an older exception.
_BEFORE_S = 60.0
_MOMENTS_S = 10.0
# Frames of a queue, a pool or a lock below the line that waits.
_INNER = 4
_LISTED = 4
_REMEDY_THREAD = (
    "Correct the {error}, and pass such errors on: catch them in the thread and put them into the queue, use a "
    "concurrent.futures executor, whose result() raises them, or wait with a timeout and check the thread."
)
_REMEDY_HELD = (
    "Begin with the {error}{at}: remove its reason, and let the `except` block, where the rank still is, wait and try "
    "again only for a short time before it raises."
)
_OF_LIVE_RANKS = (IncidentKind.SUSPECT, IncidentKind.EXCEPTION, IncidentKind.TIMEOUT, IncidentKind.INSPECTED)


def caught_by(view: Timeline, rank: int) -> tuple[CaughtException, ...]:
    """Exceptions that this rank caught shortly before it stopped making progress, or since, and most others did not.

    The newest is first. Exceptions that ended its other threads are among them.
    """
    facts = view.facts.get(rank)
    own = [error for error in facts.caught if _is_recent(error, facts) and _is_own(view, error)] if facts else []
    return tuple(sorted(own, key=lambda error: (not error.is_held, error.ago_s)))


def handling_exception(view: Timeline, ranks: Iterable[int]) -> dict[int, CaughtException]:
    """Those of these ranks that are still in an ``except`` block, with the exception that it handles."""
    held = {rank: next((error for error in caught_by(view, rank) if error.is_held), None) for rank in ranks}
    return {rank: error for rank, error in held.items() if error is not None and not error.is_consequence}


def thread_exception(facts: RankFacts) -> CaughtException | None:
    """The last exception that ended another thread of a rank that waits for a thread; None if it was long ago."""
    ended = (error for error in facts.caught if error.thread and _is_recent(error, facts))
    return min(ended, key=lambda error: error.ago_s, default=None) if waits_for_thread(facts) else None


def _with_thread(finding: Finding, error: CaughtException) -> Finding:
    """The same finding about a rank that waits for a thread that this exception has ended."""
    decided_at = finding.decided_at or location_of(raised_at(error))
    return replace(finding, decided_at=decided_at, remedy=_REMEDY_THREAD.format(error=error.type))


def waits_for_thread(facts: RankFacts) -> bool:
    """Whether a rank's main thread waits for another of its threads."""
    inner = facts.stack[-_INNER:]
    # In a pool's frames it waits for processes, or for threads that pass on what they raise.
    return is_in(WAITS_FOR_THREADS, inner) and not is_in(PROCESSES, inner)


def continued_after_exception(view: Timeline, ranks: Iterable[int]) -> tuple[int, ...]:
    """Those of these ranks that caught an exception and continued, so that they may have skipped a call."""
    return tuple(rank for rank in ranks if any(not error.thread and _is_rare(error) for error in caught_by(view, rank)))


def beyond_try(view: Timeline, ranks: Iterable[int]) -> tuple[tuple[int, ...], Frame | None]:
    """Those of these ranks that are past a ``try`` in which the others wait, and the line where these wait.

    The ``try`` catches exceptions: no exception is known, but without one these ranks would have reached that line.
    A rank whose process is gone may be among the others, according to its last traceback.
    """
    every = tuple(ranks)
    inside = {rank: frame for rank in every if (frame := _frame_in_try(view, rank)) is not None}
    beyond = tuple(rank for rank in every if rank not in inside and rank in view.facts)
    if not inside or not beyond or len({(frame.file, frame.handler) for frame in inside.values()}) > 1:
        return (), None
    return beyond, next(iter(inside.values()))


@once
def continued_before_abort(view: Timeline) -> tuple[int, ...]:
    """Ranks that caught an exception moments before gloo aborted another rank: they may have skipped its call."""
    continued = continued_after_exception(view, sorted(view.facts)) if aborted_by_gloo(view) else ()
    return tuple(rank for rank in continued if just_caught(view, rank))


def just_caught(view: Timeline, rank: int) -> tuple[CaughtException, ...]:
    """What a rank caught moments before it stopped making progress, or since, and not all the time."""
    until_s = view.facts[rank].progress.idle_s + _MOMENTS_S
    # A broken connection is a consequence.
    own = (error for error in caught_by(view, rank) if not (error.thread or error.is_consequence))
    return tuple(error for error in own if error.ago_s <= until_s and _is_rare(error))


def raised_at(error: CaughtException) -> Frame | None:
    """The deepest line of the user's code at which it was raised."""
    return deepest_user_frame(error.stack)


def skipped_at(error: CaughtException) -> Frame | None:
    """The line that made a rank skip what would have followed: the ``except`` clause, or what was raised if unknown.

    If a collective raised it, that collective is what is to be looked at.
    """
    caught = error.caught_at
    if caught is None or error.passed:
        return raised_at(error)
    around = [one for one in caught.branches if one.on is Decides.EXCEPTION and not one.jump]
    # The line is in the clause's block; the clauses of a `try` in there come after it.
    clauses = [one for one in around if one.line <= caught.line]
    is_except = bool(clauses) and clauses[-1].test.startswith("except")
    return replace(caught, line=clauses[-1].line) if is_except else raised_at(error)


def with_caught(findings: Iterable[tuple[Rule[Any], Finding]], job: JobFacts) -> list[Finding]:
    """The same findings, with evidence of what their ranks caught; the first one also mentions it in its summary."""
    if job.incident.kind not in _OF_LIVE_RANKS:
        return [finding for _, finding in findings]
    view = timeline(job)
    completed: list[Finding] = []
    for index, (rule, finding) in enumerate(findings):
        ranks = _ranks_concerned(view, rule, finding)
        caught = [(rank, error) for rank in ranks for error in caught_by(view, rank)][:_LISTED]
        evidence = tuple(Evidence(source="exception", rank=rank, text=_sentence(error, "It")) for rank, error in caught)
        new = [(rank, error) for rank, error in caught if _is_rare(error) and error_words(error) not in finding.summary]
        sentence = _sentence(new[0][1], f"Rank {new[0][0]}") if new and index == 0 else ""
        summary = joined((finding.summary, sentence))
        threads = (thread_exception(view.facts[rank]) for rank in finding.ranks if rank in view.facts)
        ended = next((error for error in threads if error is not None), None)
        if ended is not None and index == 0:
            finding = _with_thread(finding, ended)
        held = () if rule.is_mutual or rule.is_of_machine else handling_exception(view, finding.ranks).values()
        begin = next(iter(map(held_remedy, held)), "")
        remedy = finding.remedy if begin in finding.remedy else joined((begin, finding.remedy))
        completed.append(replace(finding, summary=summary, evidence=(*finding.evidence, *evidence), remedy=remedy))
    return completed


def _ranks_concerned(view: Timeline, rule: Rule[Any], finding: Finding) -> Iterator[int]:
    """The first ranks that a finding names, and those that may have diverged from them.

    If the named ranks are gone, those that caught an exception which may have ended the named ones.
    """
    yield from finding.ranks[:_LISTED]
    if rule.is_mutual:
        yield from view.besides(finding.ranks)[:_LISTED]
    elif finding.ranks and set(finding.ranks) <= set(view.silent):
        survived = (rank for rank, facts in sorted(view.facts.items()) if any(map(_left_a_call, facts.caught)))
        yield from itertools.islice(survived, _LISTED)


def _left_a_call(error: CaughtException) -> bool:
    """Whether it left an earlier call of the Trainer."""
    return error.passed.startswith("Trainer.")


def _sentence(error: CaughtException, who: str) -> str:
    at = _raised_words(error)
    ago = f", {duration_words(error.ago_s)} before this report"
    if error.thread:
        whose = "its" if who == "It" else f"{who}'s"
        return f"{whose[:1].upper()}{whose[1:]} thread {error.thread!r} ended with {error_words(error)}{at}{ago}."
    if error.is_held:
        return f"{who} is {except_block_words(error)}."
    times = f", {error.count} times" if error.count > 1 else ""
    though = ", although the guard ends the others when one rank raises" if _left_a_call(error) else ""
    return f"{who} caught {error_words(error)}{_out_of(error)}{at}{times}{ago}, and continued{though}."


def except_block_words(error: CaughtException) -> str:
    """``"in the `except` block (line 7) that caught OSError: No space left on device, raised at train.py:5"``."""
    within = f" (line {error.caught_at.line})" if error.caught_at is not None else ""
    return f"in the `except` block{within} that caught {error_words(error)}{_out_of(error)}{_raised_words(error)}"


def _raised_words(error: CaughtException) -> str:
    """``", raised at train.py:5 in read"``: apart from the message, which ends in any way; empty if unknown."""
    at = at_words(raised_at(error))
    return f", raised{at}" if at else ""


def held_remedy(error: CaughtException) -> str:
    """What to do about the exception in whose ``except`` block a rank still is."""
    return _REMEDY_HELD.format(error=error.type, at=at_words(raised_at(error)))


def _out_of(error: CaughtException) -> str:
    return f" out of {hook_words(error.passed)}" if error.passed else ""


def _is_recent(error: CaughtException, facts: RankFacts) -> bool:
    """Whether it was raised shortly before its rank stopped making progress, or since."""
    return error.is_held or _left_a_call(error) or error.ago_s <= facts.progress.idle_s + _BEFORE_S


def _is_rare(error: CaughtException) -> bool:
    return error.is_held or error.count < _USUAL


def _is_own(view: Timeline, error: CaughtException) -> bool:
    """Whether most other ranks caught nothing like it: what all ranks do alike makes none of them diverge."""
    others = len(view.facts) - 1
    return error.is_held or not others or 2 * (_ranks_by_kind(view)[_kind(error)] - 1) < others


@once
def _ranks_by_kind(view: Timeline) -> Counter[tuple[str, str]]:
    """On how many ranks each kind of exception was caught."""
    return Counter(kind for facts in view.facts.values() for kind in {*map(_kind, facts.caught)})


def _kind(error: CaughtException) -> tuple[str, str]:
    return error.type, location_of(raised_at(error))


def _frame_in_try(view: Timeline, rank: int) -> Frame | None:
    """The innermost user frame below the Trainer that is within a ``try`` whose exceptions are caught."""
    return next(
        (frame for frame in reversed(inside_trainer(stack_of(view, rank))) if frame.user and frame.handler), None
    )


def skipped_words(frame: Frame, others: str) -> str:
    """What an exception may have skipped, where none is known.

    Args:
        frame: The line within the ``try``.
        others: The ranks that have reached it, and what they do, ``"rank 0 waits"``.
    """
    return (
        f"The line {short_location(frame)}, where {others}, is in a `try`: an exception there is caught by "
        f"{condition_words(frame.handler)}, and the rest of it is skipped."
    )
