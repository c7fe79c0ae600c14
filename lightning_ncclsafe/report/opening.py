"""The beginning of every report: the answer, and why ranks were asked or compared."""

from lightning_ncclsafe.facts import Incident, IncidentKind, JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.ranks import (
    NOTHING,
    inspected_answer,
    inspected_words,
    is_inspected,
    is_recorded,
    recorded_words,
)
from lightning_ncclsafe.rules.kit.sentences import batch_words
from lightning_ncclsafe.rules.kit.wording import duration_words, ranks_words

_OPENINGS = {
    IncidentKind.SUSPECT: "made no progress for {idle}",
    IncidentKind.EXCEPTION: "raised an exception",
    IncidentKind.TIMEOUT: "made no progress for {idle}, the limit",
}

_NOTHING = {
    IncidentKind.DATA: "Nothing found: the ranks' data agrees.",
    IncidentKind.PREFLIGHT: "Nothing found: nothing is wrong with the ranks' hosts.",
}


def answer_words(diagnosis: Diagnosis) -> str:
    """The first cause with its name, or that nothing was found."""
    if diagnosis.findings:
        first = diagnosis.findings[0]
        return f"{first.rule}: {first.summary}"
    return nothing_found(diagnosis)


def nothing_found(diagnosis: Diagnosis) -> str:
    """The answer if no rule found anything."""
    ranks = diagnosis.job.ranks
    if compares(diagnosis.job):
        return nothing_words(diagnosis.job)
    if is_recorded(diagnosis.job):
        return NOTHING
    if is_inspected(diagnosis.job):
        return inspected_answer(diagnosis.job)
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
    if is_inspected(job):
        return inspected_words(job)
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


def compares(job: JobFacts) -> bool:
    """Whether ranks were only compared, not asked because something is wrong."""
    return job.incident.kind in _NOTHING


def nothing_words(job: JobFacts) -> str:
    """The answer if nothing was found."""
    return _NOTHING[job.incident.kind]


def compared_words(job: JobFacts) -> str:
    """``"all 4 ranks presented their train_dataloader"``, ``"3 of 4 ranks checked their hosts"``."""
    if job.incident.kind is IncidentKind.PREFLIGHT:
        checked = sum(facts.preflight is not None for facts in job.ranks)
        return _words(checked, job.world_size, "checked its host", "checked their hosts")
    stages = [facts.data.stage for facts in job.ranks if facts.data is not None]
    what = max(stages, key=stages.count, default="data")
    return _words(len(stages), job.world_size, f"presented its {what}", f"presented their {what}")


def _words(done: int, world_size: int, one: str, many: str) -> str:
    if done < world_size:
        return f"{done} of {world_size} ranks {many}"
    return f"the only rank {one}" if done == 1 else f"all {done} ranks {many}"
