"""What we conclude from facts: findings with their evidence, and the diagnosis that holds them."""

from dataclasses import dataclass
from enum import Enum

from lightning_ncclsafe.facts import JobFacts


class Severity(str, Enum):
    """How bad it is for the run."""

    ERROR = "error"
    """The run cannot go on."""
    WARNING = "warning"
    """The run is held up and may go on."""


class Confidence(str, Enum):
    """How sure the facts make us of a cause."""

    CERTAIN = "certain"
    """The facts allow no other reading."""
    LIKELY = "likely"
    """The facts fit this cause best; another one is conceivable."""
    POSSIBLE = "possible"
    """The facts do not contradict it, and nothing better is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation that supports a finding.

    Attributes:
        source: Where it comes from: ``"flight recorder"``, ``"stack"``, ``"phase"``, ``"host"``, ``"process"``,
            ``"exception"``, ``"source code"``, ``"loader"``, ``"storage"``, ``"collective times"``.
        text: The observation in words.
        rank: The rank it was made on; None if it is about several.
    """

    source: str
    text: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause that the facts support.

    Attributes:
        rule: Name of the rule, which is the name of the cause: ``"rank-zero-only-work"``.
        severity: How bad it is for the run.
        confidence: How sure the facts make us.
        summary: The answer in one sentence: which rank does what, where, for how long, and who waits for it.
        ranks: The ranks that cause it, ascending.
        location: ``"file:line in function"`` of the deepest line in the user's own code; empty where unknown.
        evidence: How we know.
        remedy: What to do.
    """

    rule: str
    summary: str
    ranks: tuple[int, ...]
    remedy: str
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.LIKELY
    location: str = ""
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything concluded about one incident.

    Attributes:
        job: The facts that were judged.
        findings: The causes found, the most probable first; at least one when a rank waits or raised.
        unanswered: What these facts cannot tell, one sentence each.
    """

    job: JobFacts
    findings: tuple[Finding, ...]
    unanswered: tuple[str, ...] = ()
