"""The threads that main threads wait for, named in the findings about their ranks."""

from collections.abc import Iterable
from dataclasses import replace

from lightning_ncclsafe.facts import JobFacts, RankFacts
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.rules.kit.activity import awaited_thread
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame
from lightning_ncclsafe.rules.kit.wording import (
    at_words,
    capitalised,
    joined,
    line_words,
    location_of,
    place_words,
    short_location,
)

_REMEDY_LOCKS = (
    "Let no thread wait for anything else while it holds a lock: for a queue, another thread, a server. Take several "
    "locks in the same order everywhere."
)
_REMEDY_AGAIN = "Take the lock once, in the outer function only, or make it a threading.RLock."


def with_threads(findings: Iterable[Finding], job: JobFacts) -> list[Finding]:
    """The same findings; the first also names the thread that its rank waits for, or that holds the lock it waits for.

    For a thread that a rank waits for, "the first" is the first finding about such a rank.
    """
    facts = {one.rank: one for one in job.ranks}
    completed = list(findings)
    locked = [facts[rank] for one in completed[:1] for rank in one.ranks if rank in facts and facts[rank].thread_lock]
    if locked:
        completed[0] = _with_lock(completed[0], locked[0])
    waiting = {rank for rank, one in facts.items() if awaited_thread(one) is not None}
    about = ((place, rank) for place, one in enumerate(completed) for rank in one.ranks if rank in waiting)
    for place, rank in [*about][:1]:
        completed[place] = _with_awaited(completed[place], facts[rank])
    return completed


def _with_lock(finding: Finding, facts: RankFacts) -> Finding:
    lock = facts.thread_lock
    assert lock is not None
    frame = (deepest_user_frame(lock.stack) or next(reversed(lock.stack), None)) if not lock.is_own else None
    where = f"; it is {place_words(frame)}" if frame is not None else ""
    holder = "the same thread has already taken" if lock.is_own else f"its thread {lock.thread!r} has taken"
    text = f"Rank {facts.rank} waits there for `{lock.lock}`, which {holder}{at_words(lock.taken_at)}{where}."
    seen = f"Its thread {lock.thread!r} is in {short_location(lock.stack[-1])}." if frame is not None else ""
    evidence = [Evidence(source="stack", rank=facts.rank, text=seen)] if seen else []
    return replace(
        finding,
        summary=joined((finding.summary, text)),
        evidence=(*finding.evidence, *evidence),
        remedy=_REMEDY_AGAIN if lock.is_own else _REMEDY_LOCKS,
    )


def _with_awaited(finding: Finding, facts: RankFacts) -> Finding:
    thread = awaited_thread(facts)
    assert thread is not None
    # The finding may be about another line of this rank's: where it raised an exception, for example.
    there = " there" if finding.location == location_of(deepest_user_frame(facts.stack)) else ""
    frame = deepest_user_frame(thread.stack) or thread.stack[-1]
    named = f"its thread {thread.name!r}" if thread.name else "another thread of its process"
    text = f"Rank {facts.rank} waits{there} for {named}, which is {place_words(frame)}."
    seen = f"{capitalised(named)} is at {line_words(frame)}"
    return replace(
        finding,
        summary=joined((finding.summary, text)),
        evidence=(*finding.evidence, Evidence(source="stack", rank=facts.rank, text=seen)),
    )
