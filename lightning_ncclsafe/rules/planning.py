"""What the next start of a job should do about an incident, according to the causes that were found."""

from lightning_ncclsafe.facts import IncidentKind
from lightning_ncclsafe.facts.findings import NextStart
from lightning_ncclsafe.rules.kit import Confidence, Diagnosis, Finding, Plan, Severity, timeline

SAME_MOST = 3
"""After this many starts in a row that end by the same cause at the same step, another one is not worth its time."""

# The incidents for which the guard ends a run.
_OF_GUARD = (IncidentKind.SUSPECT, IncidentKind.EXCEPTION, IncidentKind.TIMEOUT)


def cannot_go_on(diagnosis: Diagnosis) -> bool:
    """Whether the findings end the run, at the limit or before it."""
    is_over = diagnosis.job.incident.kind is IncidentKind.TIMEOUT
    return is_over or any(finding.severity is Severity.ERROR for finding in diagnosis.findings)


def next_start(diagnosis: Diagnosis, *, is_refused: bool = False) -> NextStart | None:
    """What the next start should do; None if nothing was found that ends the run, or it has no guard.

    Args:
        diagnosis: The findings.
        is_refused: Whether ranks refuse to start with them, if only their data or hosts were compared.
    """
    job = diagnosis.job
    is_ended = job.incident.kind in _OF_GUARD and cannot_go_on(diagnosis)
    if not (is_refused if job.is_compared else is_ended):
        return None
    finding = _deciding(diagnosis)
    plan, hosts = (Plan.UNKNOWN, ()) if finding is None else _planned(diagnosis, finding)
    first = diagnosis.findings[0] if diagnosis.findings else None
    return NextStart(
        plan=plan,
        rule=first.rule if first else "",
        answer=first.summary if first else "",
        hosts=hosts,
        step=max((facts.progress.global_step for facts in job.ranks), default=0),
        incident=job.incident.number,
        launch=job.launch,
        opened_ns=job.incident.opened_ns,
    )


def is_same(one: NextStart, other: NextStart) -> bool:
    """Whether two starts have ended by the same cause at the same step."""
    return bool(one.rule) and (one.rule, one.step, one.launch) == (other.rule, other.step, other.launch)


def _deciding(diagnosis: Diagnosis) -> Finding | None:
    """The most probable finding; None if it is only possible, or an equally sure one has a different plan."""
    # Warnings about hosts or data that were compared end no run.
    is_compared = diagnosis.job.is_compared
    found = [one for one in diagnosis.findings if not is_compared or one.severity is Severity.ERROR]
    first = next(iter(found), None)
    if first is None or first.confidence is Confidence.POSSIBLE:
        return None
    as_sure = {one.plan for one in found if one.confidence is first.confidence} - {Plan.UNKNOWN}
    has_doubt = first.confidence is not Confidence.CERTAIN and Plan.STOP in as_sure and as_sure != {Plan.STOP}
    return None if has_doubt else first


def _planned(diagnosis: Diagnosis, finding: Finding) -> tuple[Plan, tuple[str, ...]]:
    """The finding's plan and hosts; a plain restart if no other hosts are left."""
    if finding.plan is not Plan.RESTART_WITHOUT_HOST:
        return finding.plan, ()
    where = timeline(diagnosis.job).hosts
    hosts = {where.get(rank, "") for rank in finding.ranks}
    everywhere = len(where) < diagnosis.job.world_size or hosts == {*where.values()}
    return (Plan.RESTART, ()) if "" in hosts or everywhere else (finding.plan, tuple(sorted(hosts)))
