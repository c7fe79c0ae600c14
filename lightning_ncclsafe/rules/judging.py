"""The judge: asks all rules, puts the most probable cause first, and leaves out what only follows from it."""

from dataclasses import replace

from lightning_ncclsafe.facts import IncidentKind, JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.kit.caught import with_caught
from lightning_ncclsafe.rules.kit.places import with_places
from lightning_ncclsafe.rules.kit.rule import Rule, name_of
from lightning_ncclsafe.rules.kit.timeline import forget
from lightning_ncclsafe.rules.past_lateness import with_past_lateness
from lightning_ncclsafe.rules.unknowns import unknowns

# Causes that are read from an exception, so that it need not be told twice.
_OF_EXCEPTIONS = (
    "gpu-memory-exhausted",
    "shm-exhausted",
    "worker-died",
    "exception-during-save",
    "skipped-step",
    "unused-parameters",
    "timeout-misuse",
    "diverged-collectives",
)
# Ranks that do not make the same number of steps: what they then call, or leave out, follows from that.
_OTHER_STEPS = ("different-trainer-settings", "stopped-early")
# What follows from a cause that is known by its own name; where that is only possible, both are told.
_FOLLOWS_FROM = {
    "stopped-early": ("different-trainer-settings",),
    "skipped-step": _OTHER_STEPS,
    "unused-parameters": (*_OTHER_STEPS, "skipped-step"),
    "mismatched-collective": _OTHER_STEPS,
    "diverged-log-keys": _OTHER_STEPS,
    "diverged-collectives": (
        *_OTHER_STEPS,
        "checkpoint-skipped-barrier",
        "crossed-groups",
        "diverged-log-keys",
        "mismatched-collective",
        "skipped-step",
        "unfinished-rank",
        "unused-parameters",
    ),
    "uneven-batches": (*_OTHER_STEPS, "diverged-collectives", "skipped-step", "unused-parameters"),
}

# What gloo ends processes for.
_ENDS_PROCESSES = ("mismatched-collective", "diverged-collectives")

_CONFIDENCES = tuple(Confidence)


def judge(job: JobFacts, rules: tuple[Rule, ...] = HANG_RULES) -> Diagnosis:
    """Asks every rule and puts the most probable cause first.

    A rule that fails never hides the answers of the others: it is named in ``unanswered``.

    Args:
        job: The facts of all ranks that answered.
        rules: The rules to ask.
    """
    findings: list[Finding] = []
    failures: list[str] = []
    for rule in rules:
        try:
            findings.extend(rule(job))
        except Exception as error:  # a report with one cause less is better than none
            failures.append(f"The rule {name_of(rule)} failed ({type(error).__name__}: {error}).")
    missing = unknowns(job)
    told = with_caught(_ordered(_as_recorded(findings, job)), job)
    forget()
    told = with_places(with_past_lateness(told, job), job)
    return Diagnosis(job=job, findings=tuple(told), unanswered=(*missing, *failures))


def _as_recorded(findings: list[Finding], job: JobFacts) -> list[Finding]:
    """An exception that stands in a log may have been caught: whether it ended its rank is not seen."""
    if job.incident.kind is not IncidentKind.RECORDED:
        return findings
    return [
        replace(finding, confidence=Confidence.LIKELY)
        if finding.rule in _OF_EXCEPTIONS[:3] and finding.confidence is Confidence.CERTAIN
        else finding
        for finding in findings
    ]


def _ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    kept = [finding for finding in findings if not _superseded(finding, findings)]
    return tuple(sorted(kept, key=lambda finding: _CONFIDENCES.index(finding.confidence)))


def _names_cause(finding: Finding, of: str) -> bool:
    return finding.rule in _FOLLOWS_FROM[of] and _is_likely(finding)


def _is_likely(finding: Finding) -> bool:
    return finding.confidence is not Confidence.POSSIBLE


def _superseded(finding: Finding, findings: list[Finding]) -> bool:
    """That a rank is behind is no news once a cause names this rank, or explains why nobody stands out.

    Nor is an exception, once it has been told what it says.
    """
    if finding.rule == "failed-rank":
        told = {rank for other in findings if other.rule in _OF_EXCEPTIONS for rank in other.ranks}
        return bool(finding.ranks) and told.issuperset(finding.ranks)
    if finding.rule in _FOLLOWS_FROM:
        return any(_names_cause(other, finding.rule) for other in findings)
    if finding.rule == "dead-rank":
        likely = (other for other in findings if other.rule in _ENDS_PROCESSES and _is_likely(other))
        return any(set(other.ranks) >= set(finding.ranks) for other in likely)
    if finding.rule != "rank-behind":
        return False
    # Why ranks gave up waiting does not tell for whom they waited.
    better = [other for other in findings if other.rule not in ("rank-behind", "timeout-misuse")]
    if not better:
        return False
    covered = {rank for other in better for rank in other.ranks}
    return not finding.ranks or covered.issuperset(finding.ranks) or finding.confidence is Confidence.POSSIBLE
