"""How every report on an incident begins: the answer, and why ranks were asked."""

from lightning_ncclsafe.facts import Incident, IncidentKind
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.compared import compared_words, compares, nothing_words
from lightning_ncclsafe.report.recorded import NOTHING, is_recorded, recorded_words
from lightning_ncclsafe.rules.kit.sentences import batch_words
from lightning_ncclsafe.rules.kit.wording import duration_words, ranks_words

_OPENINGS = {
    IncidentKind.SUSPECT: "made no progress for {idle}",
    IncidentKind.EXCEPTION: "raised an exception",
    IncidentKind.TIMEOUT: "made no progress for {idle}, the limit",
}


def answer_words(diagnosis: Diagnosis) -> str:
    """The first cause with its name, or that nothing was found."""
    if diagnosis.findings:
        first = diagnosis.findings[0]
        return f"{first.rule}: {first.summary}"
    return nothing_found(diagnosis)


def nothing_found(diagnosis: Diagnosis) -> str:
    """What there is to say where no rule has found anything."""
    ranks = diagnosis.job.ranks
    if compares(diagnosis.job):
        return nothing_words(diagnosis.job)
    if is_recorded(diagnosis.job):
        return NOTHING
    if not ranks:
        return "Nothing found: no rank answered."
    where = sorted({batch_words(facts.progress) for facts in ranks})
    more = f" and {len(where) - 2} more places" if len(where) > 2 else ""
    names = ranks_words(facts.rank for facts in ranks)
    return f"Nothing found: no rank waits for another; {names} at work: {'; '.join(where[:2])}{more}."


def incident_words(diagnosis: Diagnosis) -> str:
    """Why ranks were asked, how many of them answered, and the limits that applied."""
    incident, job = diagnosis.job.incident, diagnosis.job
    if compares(diagnosis.job):
        return f"Incident {incident.number}: {compared_words(job)}."
    if is_recorded(job):
        return recorded_words(job)
    opening = _OPENINGS[incident.kind].format(idle=duration_words(incident.idle_s))
    return (
        f"Incident {incident.number}: rank {incident.opened_by} {opening}. {len(job.ranks)} of {job.world_size} ranks "
        f"answered.{_limits(incident)}"
    )


def _limits(incident: Incident) -> str:
    if not incident.timeout_s:
        return ""
    suspect, limit = duration_words(incident.suspect_after_s), duration_words(incident.timeout_s)
    return f" A rank is suspect after {suspect}; the limit is {limit}."
