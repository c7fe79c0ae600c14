"""A check of hosts: the problems that it finds on ranks and hosts become one finding."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps

from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    JobHosts,
    Plan,
    Rule,
    Severity,
    capitalised,
    evidence_about,
    preflight_rule,
)

_LISTED = 3
_EVIDENCE = 8
_SEVERITIES = tuple(Severity)
_CONFIDENCES = tuple(Confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem on some ranks.

    Attributes:
        ranks: The ranks, ascending.
        text: What was found and what was expected, in words that follow a colon, without a full stop.
        badness: Higher values are listed first.
        severity: How bad it is for the run.
        confidence: How sure it is.
    """

    ranks: tuple[int, ...]
    text: str
    badness: float = 0.0
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.CERTAIN


Check = Callable[[JobHosts], Iterator[Problem]]


def check(
    *, after: str = "", remedy: str, source: str = "host", plan: Plan = Plan.UNKNOWN
) -> Callable[[Check], Rule[JobHosts]]:
    """Makes a rule of a function that yields problems: all of them are one finding, the worst first.

    Args:
        source: Where the evidence comes from.
    """

    def register(ask: Check) -> Rule[JobHosts]:
        @wraps(ask)
        def together(view: JobHosts) -> Iterator[Finding]:
            if problems := _merged(ask(view)):
                yield _finding(view, problems, source)

        return preflight_rule(after=after, remedy=remedy, plan=plan)(together)

    return register


def _merged(problems: Iterable[Problem]) -> list[Problem]:
    """Problems with the same text merged, the worst first."""
    by_text: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_text[problem.text].append(problem)
    merged = [
        Problem(
            ranks=tuple(sorted({rank for problem in same for rank in problem.ranks})),
            text=text,
            badness=max(problem.badness for problem in same),
            severity=min((problem.severity for problem in same), key=_SEVERITIES.index),
            confidence=min((problem.confidence for problem in same), key=_CONFIDENCES.index),
        )
        for text, same in by_text.items()
    ]
    return sorted(merged, key=lambda one: (_SEVERITIES.index(one.severity), -one.badness, one.ranks))


def _finding(view: JobHosts, problems: list[Problem], source: str) -> Finding:
    more = [f"{len(problems) - _LISTED:,} more in the evidence"] if len(problems) > _LISTED else []
    return Finding(
        rule="",
        severity=problems[0].severity,
        confidence=min((problem.confidence for problem in problems), key=_CONFIDENCES.index),
        summary=capitalised("; ".join([*_parts(view, problems[:_LISTED]), *more])) + ".",
        ranks=tuple(sorted({rank for problem in problems for rank in problem.ranks})),
        evidence=tuple(_evidence(view, problem, source) for problem in problems[:_EVIDENCE]),
        remedy="",
    )


def _parts(view: JobHosts, problems: list[Problem]) -> Iterator[str]:
    """Each problem after its place, which is not repeated."""
    before: tuple[int, ...] = ()
    for problem in problems:
        yield problem.text if problem.ranks == before else f"{view.where(problem.ranks)}: {problem.text}"
        before = problem.ranks


def _evidence(view: JobHosts, problem: Problem, source: str) -> Evidence:
    text = f"{capitalised(view.where(problem.ranks))}: {problem.text}."
    return evidence_about(problem.ranks, source, text)
