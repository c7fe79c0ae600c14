"""Asks all rules about a job, puts the most probable cause first, and leaves out causes that only follow from it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from lightning_ncclsafe.facts import JobFacts, RankFacts, Straggler
from lightning_ncclsafe.rules.common_paths import with_common_paths
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Diagnosis,
    Evidence,
    Finding,
    Findings,
    Rule,
    at_words,
    awaited_thread,
    capitalised,
    clause,
    deepest_user_frame,
    duration_words,
    forget,
    is_gone,
    joined,
    line_words,
    location_of,
    place_words,
    ranks_by,
    short_location,
    short_place,
    timeline,
    with_caught,
)
from lightning_ncclsafe.rules.unknowns import unknowns

_CONFIDENCES = tuple(Confidence)
# A longer list of hosts is of no use.
_FEW_HOSTS = 4
_REMEDY_LOCKS = (
    "Let no thread wait for anything else while it holds a lock: for a queue, another thread, a server. Take several "
    "locks in the same order everywhere."
)
_REMEDY_OWN_PATH = (
    "If another rank makes this path, compute its name on one rank and send it to the others "
    "(trainer.strategy.broadcast): the time, and hash() of text, differ between processes."
)
_REMEDY_AGAIN = "Take the lock once, in the outer function only, or make it a threading.RLock."


def judge(job: JobFacts, rules: Sequence[Rule[Any]] = HANG_RULES) -> Diagnosis:
    """Asks every rule and puts the most probable cause first.

    A rule that fails never hides the answers of the others: it is named in ``unanswered``.

    Args:
        rules: The rules to ask.
    """
    asked, job = job, with_common_paths(job)
    every: list[tuple[Rule[Any], Finding]] = []
    failures: list[str] = []
    for rule in rules:
        try:
            every.extend((rule, finding) for finding in rule.findings(job))
        except Exception as error:  # a report with one cause less is better than none
            failures.append(f"The rule {rule.name} failed ({type(error).__name__}: {error}).")
    missing = unknowns(job)
    others = Findings(every)
    kept = [(rule, finding) for rule, finding in every if not rule.is_superseded(finding, others)]
    kept = [(rule, _as_of_moments(rule, finding, job)) for rule, finding in kept]
    kept = sorted(kept, key=lambda pair: _CONFIDENCES.index(pair[1].confidence))
    findings = [_with_own_path(finding, job) for finding in _with_threads(with_caught(kept, job), job)]
    if kept and _has_own_remedy(*kept[0], job):
        findings[0] = replace(findings[0], remedy=kept[0][1].remedy)
    findings = [_with_hosts(finding, job) for finding in _with_past_lateness(findings, job)]
    forget()
    return Diagnosis(job=asked, findings=tuple(findings), unanswered=(*missing, *failures))


def _as_of_moments(rule: Rule[Any], finding: Finding, job: JobFacts) -> Finding:
    """The same finding; no more than possible if it compares ranks whose facts are from different moments."""
    # Machines are judged by what happened over some time.
    if job.moved is None or rule.is_of_machine or _is_final(rule, finding, job):
        return finding
    return replace(finding, confidence=Confidence.POSSIBLE)


def _is_final(rule: Rule[Any], finding: Finding, job: JobFacts) -> bool:
    """Whether it is about ranks that have raised or are gone: progress of others undoes neither."""
    view = timeline(job)
    read = {rank for rank, facts in view.facts.items() if facts.exception is not None and rule.reads_exceptions}
    return any(rank in read or rank in view.raised or is_gone(view, rank) for rank in finding.ranks)


def _has_own_remedy(rule: Rule[Any], finding: Finding, job: JobFacts) -> bool:
    """Whether it is not about what a rank waits for, a lock perhaps: the rank has raised, or its machine delays it."""
    raised = {facts.rank for facts in job.ranks if facts.exception is not None}
    return rule.reads_exceptions or rule.is_of_machine or not raised.isdisjoint(finding.ranks)


def _with_threads(findings: Iterable[Finding], job: JobFacts) -> list[Finding]:
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


def _with_own_path(finding: Finding, job: JobFacts) -> Finding:
    """The same finding; if its line pauses until a path exists, with the line that makes another path in each rank."""
    own = (one for one in job.ranks if one.own_path_at and one.rank in finding.ranks[:1])
    facts = next(own, None)
    if facts is None or finding.location != location_of(deepest_user_frame(facts.stack)):
        return finding
    text = (
        f"Rank {facts.rank} waits there for a path that is made of a value which each process computes for itself, at "
        f"{short_place(facts.own_path_at)}."
    )
    return replace(
        finding,
        summary=joined((finding.summary, text)),
        decided_at=facts.own_path_at,
        remedy=joined((finding.remedy, _REMEDY_OWN_PATH)),
    )


def _with_hosts(finding: Finding, job: JobFacts) -> Finding:
    """The same finding; if the job has several hosts, with the hosts of its ranks as the first evidence."""
    hosts = timeline(job).hosts
    # Findings that compare ranks before training name the hosts themselves.
    if len(set(hosts.values())) < 2 or job.is_compared:
        return finding
    there = ranks_by({rank: hosts[rank] for rank in finding.ranks if rank in hosts})
    if not 0 < len(there) <= _FEW_HOSTS:
        return finding
    words = "; ".join(f"{clause(ranks, 'runs|run')} on {host}" for host, ranks in there.items())
    return replace(finding, evidence=(Evidence(source="place", text=f"{capitalised(words)}."), *finding.evidence))


def _with_past_lateness(findings: Iterable[Finding], job: JobFacts) -> list[Finding]:
    """The same findings, with evidence about ranks that have kept the others waiting before."""
    stragglers = (straggler for facts in job.ranks for straggler in facts.stragglers)
    # Ranks were informed at different times: the latest knowledge counts.
    known = {straggler.rank: straggler for straggler in sorted(stragglers, key=lambda one: one.until_ns)}
    return [
        replace(
            finding,
            evidence=(*finding.evidence, *(_lateness(known[rank], job) for rank in finding.ranks if rank in known)),
        )
        for finding in findings
    ]


def _lateness(straggler: Straggler, job: JobFacts) -> Evidence:
    began = datetime.fromtimestamp(straggler.since_ns / 1e9, tz=timezone.utc)
    ago_s = max((job.incident.opened_ns - straggler.since_ns) / 1e9, 0.0)
    where = f", in {straggler.phase}" if straggler.phase else ""
    ended = "; it had recovered" if straggler.is_over else ""
    return Evidence(
        rank=straggler.rank,
        source="collective times",
        text=(
            f"It kept the others waiting before: late in {straggler.share:.0%} of {straggler.of_steps} steps, by "
            f"{straggler.mean_s * 1e3:.0f} ms on average{where}, since {began:%H:%M:%S} UTC, {duration_words(ago_s)} "
            f"ago{ended}."
        ),
    )
