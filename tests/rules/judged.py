"""What the rules find in a job, in the forms in which tests ask for it."""

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.judging import judge


def first(facts: JobFacts) -> Finding:
    """The most probable cause."""
    return judge(facts).findings[0]


def rules_found(facts: JobFacts) -> list[str]:
    """All causes, the most probable first."""
    return [finding.rule for finding in judge(facts).findings]


def found(facts: JobFacts) -> dict[str, Confidence]:
    """How sure each cause is that was found."""
    return {finding.rule: finding.confidence for finding in judge(facts).findings}
