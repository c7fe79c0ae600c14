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


class Plan(str, Enum):
    """What the next start of a job is to do about a cause that has ended this one."""

    RESTART = "restart"
    """Start again: the fault is nobody's, or a machine's and passes."""
    RESTART_WITHOUT_HOST = "restart-without-host"
    """Start again elsewhere: the fault is a host's, and comes again there."""
    STOP = "stop"
    """Do not start again: the code, its settings or its data are wrong, and it comes again wherever they run."""
    UNKNOWN = "unknown"
    """The cause does not tell whose fault it is. The next start goes on."""


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
        plan: What the next start is to do about it.
    """

    rule: str
    summary: str
    ranks: tuple[int, ...]
    remedy: str
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.LIKELY
    location: str = ""
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
    """What the next start of a job is to do, as the incident that has ended this one tells: ``plan.json``.

    Attributes:
        plan: What to do.
        rule: Name of the cause that decides it; empty where none was found.
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
