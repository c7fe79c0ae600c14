"""Diagnoses an inspected job from its facts, and joins the facts of several hosts."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from lightning_ncclsafe.code.libraries import TRAINER_CALL
from lightning_ncclsafe.facts import ENDED, JobFacts, Phase, RankFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit import capitalised, clause, different_waits, forget, is_in, timeline, verb

LONG_STEP_S = 20.0
"""Seconds. A rank that has made no progress for less may be in a long step, which from outside looks like a hang."""
LONG_WAIT_S = 5.0
"""The same if every rank waits, so that none is in a step: messages between ranks take less."""


def diagnosis_of(job: JobFacts) -> Diagnosis:
    """The diagnosis of an inspected job; without findings if the job moves, or if no stack could be read."""
    is_read = any(facts.inspection and facts.inspection.looks for facts in job.ranks) or bool(job.witnessed)
    stands = job.incident.idle_s > 0 and bool(job.ranks)
    diagnosis = judge(job, HANG_RULES if stands and is_read else ())
    unfinished = (_unless_finished(finding, job) for finding in diagnosis.findings)
    found = [_unless_it_goes_on(finding, job) for finding in unfinished if finding is not None]
    forget()
    order = [*Confidence]
    return replace(diagnosis, findings=tuple(sorted(found, key=lambda finding: order.index(finding.confidence))))


def wait_in_vain(job: JobFacts) -> bool:
    """Whether all ranks are on this host and wait, in different calls or for a rank that has failed or was killed."""
    view = timeline(job)
    groups = {facts.inspection.group.name for facts in job.ranks if facts.inspection and facts.inspection.group}
    lost = {one.rank for one in job.witnessed if one.ended_by or one.exit_code}
    all_wait = len(view.waiting) == len(job.ranks) > 0 and lost.issuperset(view.silent) and not job.elsewhere
    found = all_wait and (bool(lost) or len(groups) > 1 or different_waits(view) is not None)
    forget()
    return found


def _unless_it_goes_on(finding: Finding, job: JobFacts) -> Finding:
    """Lowers the confidence in a finding about ranks at work, as they may still reach the others."""
    moving = {facts.rank for facts in job.ranks if facts.inspection is not None and facts.inspection.moved}
    if finding.ranks and moving.issuperset(finding.ranks):
        they = verb(finding.ranks, "it", "they")
        words = f"{clause(finding.ranks, 'moves|move')}: {they} may still reach the others, so inspect again."
        return replace(finding, summary=f"{finding.summary} {capitalised(words)}", confidence=Confidence.POSSIBLE)
    view = timeline(job)
    keeping_lock = {process.rank for process in job.witnessed if process.gil_held}
    at_work = {*view.working(rank for rank in finding.ranks if rank in view.facts), *(keeping_lock & {*finding.ranks})}
    if at_work and job.incident.idle_s < LONG_STEP_S:
        return replace(finding, confidence=Confidence.POSSIBLE)
    may_go_on = any(_may_go_on(view.facts[rank]) for rank in finding.ranks if rank in view.facts)
    is_doubtful = finding.confidence is Confidence.CERTAIN and (bool(at_work) or may_go_on)
    return replace(finding, confidence=Confidence.LIKELY) if is_doubtful else finding


def _may_go_on(facts: RankFacts) -> bool:
    """Whether its exception has left neither the Trainer nor the program, so that outer code may catch it."""
    is_over = facts.progress.phase is Phase.FINISHED
    return facts.exception is not None and not is_over and not is_in(TRAINER_CALL, facts.exception.stack)


def _unless_finished(finding: Finding, job: JobFacts) -> Finding | None:
    """Lowers the confidence in a finding about ranks whose end nobody saw: they may have been killed or have finished.

    Drops the finding if no other rank waits or is in a call of the Trainer.
    """
    unknown = {one.rank for one in job.witnessed if one.state in ENDED and not one.ended_by and not one.exit_code}
    if unknown.isdisjoint(finding.ranks):
        return finding
    is_over = all(facts.progress.phase in (Phase.UNKNOWN, Phase.FINISHED) for facts in job.ranks)
    return None if is_over and not timeline(job).waiting else replace(finding, confidence=Confidence.POSSIBLE)


def joined(jobs: Iterable[JobFacts]) -> list[JobFacts]:
    """The same jobs, with inspections of one job's hosts joined; of each host, only the last inspection counts.

    Args:
        jobs: Of any kind; those that were not inspected are returned unchanged.
    """
    others: list[JobFacts] = []
    alike: dict[tuple[str, int], list[JobFacts]] = defaultdict(list)
    for job in jobs:
        if job.is_inspected and job.launch:
            alike[job.launch, job.world_size].append(job)
        else:
            others.append(job)
    return [*others, *(_one(of_job) for of_job in alike.values())]


def _one(jobs: list[JobFacts]) -> JobFacts:
    if len(jobs) == 1:
        return jobs[0]
    ordered = sorted(jobs, key=lambda job: job.incident.opened_ns)
    ranks = {facts.rank: facts for job in ordered for facts in job.ranks}
    # The later inspection of a host may have found that a rank has ended since.
    gone = {process.rank: process for job in ordered for process in job.witnessed if process.rank not in ranks}
    known = ranks.keys() | gone.keys()
    last = ordered[-1]
    return replace(
        last,
        incident=replace(last.incident, opened_by=min(known), idle_s=max(job.incident.idle_s for job in ordered)),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        witnessed=tuple(gone[rank] for rank in sorted(gone)),
        elsewhere=tuple(rank for rank in range(last.world_size) if rank not in known),
        missing=tuple(dict.fromkeys(text for job in ordered for text in job.missing)),
    )
