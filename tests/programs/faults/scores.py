"""What was right and what was not, in one case and in all: plain arithmetic."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from truths import Case

from lightning_ncclsafe.facts import IncidentKind
from lightning_ncclsafe.facts.findings import NextStart
from lightning_ncclsafe.report.json import read_report
from lightning_ncclsafe.rules.planning import next_start

UNREHEARSED = "from public threads"
"""The row of faults that were written without sight of a rule."""
QUIET = "watching "
"""How the only line begins that a healthy run says."""
PLANS = {"code": ("stop", "unknown"), "machine": ("restart", "restart-without-host", "unknown")}
"""Those that are not wrong, by whose fault it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a case was judged, beside its truth. None is what does not apply.

    Attributes:
        case: Its name.
        causes: True names of the cause; none for a healthy one.
        is_unrehearsed: Whether it was written after a public thread, without sight of a rule.
        named: The name that was given first; empty if there was none.
        confidence: How sure that answer says to be: ``"certain"``, ``"likely"`` or ``"possible"``; empty without one.
        cause_right: Whether that is a true one.
        ranks_right: Whether the ranks are those that cause it.
        line_right: Whether the line is the marked one.
        line_told: Whether that is, or the one at which it was decided that ranks come there or not.
        phase_right: Whether those ranks were seen in the right phase.
        fault_of: ``"code"``, ``"machine"`` or ``"either"``; empty of a healthy one.
        plan: What the next start would be told to do; empty where nothing was reported.
        plan_right: Whether that is no ``stop`` for a machine's fault, no ``restart`` for wrong code, and leaves no host
            out that is healthy.
        delay_s: From when it went wrong to the verdict, seconds.
        false_alarm: Of a healthy one, whether anything was said.
        skipped: Why it was not run; empty if it was.
        answer: What was said first, or why nothing was.
    """

    case: str
    causes: tuple[str, ...]
    is_unrehearsed: bool = False
    named: str = ""
    confidence: str = ""
    cause_right: bool | None = None
    ranks_right: bool | None = None
    line_right: bool | None = None
    line_told: bool | None = None
    phase_right: bool | None = None
    fault_of: str = ""
    plan: str = ""
    plan_right: bool | None = None
    delay_s: float | None = None
    false_alarm: bool | None = None
    skipped: str = ""
    answer: str = ""

    @property
    def names_culprit(self) -> bool:
        """Whether cause, ranks and line are right."""
        return False not in (self.cause_right, self.ranks_right, self.line_right)

    @property
    def is_right(self) -> bool:
        """Whether nothing about it is wrong; one that was not run is not."""
        is_wrong = self.false_alarm or False in (self.phase_right, self.plan_right)
        return not self.skipped and self.names_culprit and not is_wrong


def planned(report: dict[str, Any]) -> NextStart | None:
    """What the next start would be told if the run were ended by what was reported; None where nothing would be."""
    diagnosis = read_report(json.dumps(report).encode())
    job = diagnosis.job
    if job.incident.kind not in (IncidentKind.DATA, IncidentKind.PREFLIGHT):
        job = replace(job, incident=replace(job.incident, kind=IncidentKind.TIMEOUT))
    return next_start(replace(diagnosis, job=job), is_refused=True)


def _is_right_plan(case: Case, start: NextStart, report: dict[str, Any]) -> bool | None:
    """None where it may be anybody's fault, and no host is left out."""
    at_fault = {facts["host"] for facts in report["job"]["ranks"] if facts["rank"] in case.ranks}
    at_fault |= {one["host"] for one in report["job"].get("silent_hosts", ()) if {*one["ranks"]} & {*case.ranks}}
    if not {*start.hosts} <= at_fault:
        return False
    fits = PLANS.get(case.scenario.fault_of)
    return None if fits is None else start.plan.value in fits


def score_fault(
    case: Case,
    report: dict[str, Any] | None,
    delay_s: float | None = None,
    why_none: str = "",
    start: NextStart | None = None,
) -> Score:
    """Of a case that has gone wrong: its first report, or None if there was none.

    Args:
        case: The case.
        report: What was reported, as in ``report.json``.
        delay_s: From when it went wrong to the report, seconds.
        why_none: What became of it without a report.
        start: What the next start would be told to do.
    """
    finding: dict[str, Any] = next(iter(report["findings"]), {}) if report else {}
    rank_facts = {facts["rank"]: facts for facts in report["job"]["ranks"]} if report else {}
    truth = case.scenario
    lines = (finding.get("location", ""), finding.get("decided_at", ""))
    told = [case.is_marked(line) for line in lines] if case.place else []
    phases = {rank_facts[rank]["progress"]["phase"] for rank in case.ranks if rank in rank_facts}
    return Score(
        case=case.name,
        causes=truth.causes,
        is_unrehearsed=bool(truth.source),
        named=finding.get("rule", ""),
        confidence=finding.get("confidence", ""),
        cause_right=finding.get("rule") in truth.causes,
        ranks_right=finding.get("ranks") == [*case.ranks] if truth.has_ranks else None,
        line_right=told[0] if told else None,
        line_told=any(told) if told else None,
        phase_right=phases == {case.phase} if case.phase and phases else None,
        fault_of=truth.fault_of,
        plan=start.plan.value if start is not None else "",
        plan_right=_is_right_plan(case, start, report) if start is not None and report is not None else None,
        delay_s=delay_s,
        answer=finding.get("summary", "") or why_none,
    )


def score_healthy(
    case: Case, report: dict[str, Any] | None, exit_codes: Iterable[int], said: Iterable[str], *, started: int
) -> Score:
    """Of a healthy case: it has to come to its end, and to say nothing.

    Args:
        case: The case.
        report: A report that was written all the same.
        exit_codes: Of what was started, and has ended.
        said: The lines that the package has printed.
        started: How many programs were started: all ranks, or what starts them.
    """
    codes = [*exit_codes]
    words = [line.removeprefix("[ncclsafe] ") for line in said]
    loud = [line for line in words if not line.startswith(QUIET)]
    ended = len(codes) == started and not any(codes)
    findings = report["findings"] if report else []
    named = findings[0]["rule"] if findings else ""
    how_ended = "" if ended else f"exit codes {codes}"
    return Score(
        case=case.name,
        causes=(),
        is_unrehearsed=bool(case.scenario.source),
        named=named,
        confidence=findings[0]["confidence"] if findings else "",
        false_alarm=bool(report or loud or not ended),
        answer=" | ".join([*loud[:2], *([how_ended] if how_ended else [])]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Several scores together.

    Attributes:
        name: Of the cause, or of all.
        scores: How many were run.
        skipped: How many were not.
        cause: How many causes were named right, of how many.
        ranks: How often the ranks were, of how many.
        line: How often the line was, of how many.
        told: How often that line was, or the one at which it was decided.
        phase: How often the phase was, of how many.
        plan: How often the plan was not against whose fault it is, of how many.
        entirely: How many were right in all of these, of how many.
        median_s: From when it went wrong to the verdict, seconds; None where nothing is known.
        longest_s: The longest of these.
        false_alarms: How many healthy ones were not quiet, of how many.
    """

    name: str
    scores: int
    skipped: int
    cause: tuple[int, int]
    ranks: tuple[int, int]
    line: tuple[int, int]
    told: tuple[int, int]
    phase: tuple[int, int]
    plan: tuple[int, int]
    entirely: tuple[int, int]
    median_s: float | None
    longest_s: float | None
    false_alarms: tuple[int, int]


def row(name: str, scores: Iterable[Score]) -> Row:
    """The sums of scores."""
    every = [*scores]
    run = [score for score in every if not score.skipped]
    delays_s = [score.delay_s for score in run if score.delay_s is not None]
    return Row(
        name=name,
        scores=len(run),
        skipped=len(every) - len(run),
        cause=_share(score.cause_right for score in run),
        ranks=_share(score.ranks_right for score in run),
        line=_share(score.line_right for score in run),
        told=_share(score.line_told for score in run),
        phase=_share(score.phase_right for score in run),
        plan=_share(score.plan_right for score in run),
        entirely=_share(score.is_right for score in run if score.causes),
        median_s=median(delays_s) if delays_s else None,
        longest_s=max(delays_s, default=None),
        false_alarms=_share(score.false_alarm for score in run),
    )


def _share(answers: Iterable[bool | None]) -> tuple[int, int]:
    known = [answer for answer in answers if answer is not None]
    return sum(known), len(known)


def rows(scores: Iterable[Score]) -> list[Row]:
    """One of each cause, a case with several under its first; then those of healthy ones, unrehearsed ones, and all."""
    every = [*scores]
    unrehearsed = [score for score in every if score.is_unrehearsed and score.causes]
    by_cause: dict[str, list[Score]] = defaultdict(list)
    for score in every:
        by_cause[score.causes[0] if score.causes else "healthy"].append(score)
    well = by_cause.pop("healthy", [])
    found = [row(cause, by_cause[cause]) for cause in sorted(by_cause)]
    more = {"healthy": well, UNREHEARSED: unrehearsed}
    return [*found, *(row(name, of) for name, of in more.items() if of), row("in total", every)]


def calibration(scores: Iterable[Score]) -> dict[str, tuple[int, int]]:
    """Of the answers that say to be so sure, how many are right in cause, ranks and line, of how many.

    An alarm that a healthy training raised is an answer, and wrong.
    """
    by_confidence: dict[str, list[bool | None]] = {"certain": [], "likely": [], "possible": []}
    for score in scores:
        if score.confidence and not score.skipped:
            by_confidence[score.confidence].append(bool(score.causes) and score.names_culprit)
    return {confidence: _share(answers) for confidence, answers in by_confidence.items()}


def plans(scores: Iterable[Score]) -> dict[str, Counter[str]]:
    """How often each plan was made, by whose fault it was."""
    found: dict[str, Counter[str]] = {side: Counter() for side in (*PLANS, "either")}
    for score in scores:
        if score.plan:
            found[score.fault_of][score.plan] += 1
    return found


def exit_code(scores: Iterable[Score]) -> int:
    """0 if something was run and nothing of it was wrong, 1 if not; what could not be run here is no failure."""
    run = [score for score in scores if not score.skipped]
    return int(not run or not all(score.is_right for score in run))
