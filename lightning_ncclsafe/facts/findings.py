"""What we conclude from facts: findings with their evidence, and the diagnosis that holds them."""

from dataclasses import dataclass
from enum import Enum

from lightning_ncclsafe.facts import JobFacts


class Severity(str, Enum):
    """How bad it is for the run."""

    ERROR = "error"
    """The run cannot continue."""
    WARNING = "warning"
    """The run is delayed and may continue."""


class Confidence(str, Enum):
    """How well the facts support a cause."""

    CERTAIN = "certain"
    """The facts allow no other cause, and no other ranks."""
    LIKELY = "likely"
    """The facts fit this cause best, but another one is conceivable."""
    POSSIBLE = "possible"
    """The facts do not contradict it, and nothing better is known."""


class Plan(str, Enum):
    """What the next start of a job should do about the cause that ended this one."""

    RESTART = "restart"
    """Restart: nobody's fault, or a passing fault of a machine."""
    RESTART_WITHOUT_HOST = "restart-without-host"
    """Restart elsewhere: the fault is on a host, and recurs there."""
    STOP = "stop"
    """Do not restart: the code, its settings or its data are wrong, and the fault recurs wherever they run."""
    UNKNOWN = "unknown"
    """The cause does not show whose fault it is. The next start trains."""


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
        confidence: How well the facts support it.
        summary: The answer in one sentence: which rank does what, where, for how long, and who waits for it.
        ranks: The ranks that cause it, ascending.
        location: ``"file:line in function"`` of the deepest line in the user's own code; empty if unknown. If hosts
            have the code in different folders, the path is that of the first one.
        decided_at: ``"file:line in function"`` of the condition, loop or jump that may have led ranks to that line or
            around it, if there is only one; else empty. If that line is itself a jump, of the condition around it.
        evidence: The observations that support it.
        remedy: What to do.
        plan: What the next start should do about it.
    """

    rule: str
    summary: str
    ranks: tuple[int, ...]
    remedy: str
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.LIKELY
    location: str = ""
    decided_at: str = ""
    evidence: tuple[Evidence, ...] = ()
    plan: Plan = Plan.UNKNOWN


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStart:
    """What the next start of a job should do, according to the incident that ended this one: ``plan.json``.

    Attributes:
        plan: What to do.
        rule: Name of the cause that decides it; empty if none was found.
        answer: The cause in one sentence.
        hosts: The hosts to start without, sorted; empty unless the plan is to leave some out.
        step: Optimizer steps that had been taken by then.
        incident: Number of the incident.
        launch: What started the job, equal for all its starts; see :class:`~lightning_ncclsafe.facts.JobFacts`.
        opened_ns: When the incident was opened, nanoseconds since the epoch.
    """

    plan: Plan
    rule: str = ""
    answer: str = ""
    hosts: tuple[str, ...] = ()
    step: int = 0
    incident: int = 0
    launch: str = ""
    opened_ns: int = 0
