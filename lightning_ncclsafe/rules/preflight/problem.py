"""A check of hosts: what it finds on single ranks or hosts is put together to one finding, however many they are."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps

from lightning_ncclsafe.rules.kit import (
    Checked,
    Confidence,
    Evidence,
    Finding,
    Plan,
    Rule,
    Severity,
    capitalised,
    preflight_rule,
)

_LISTED = 3
_EVIDENCE = 8
_SEVERITIES = tuple(Severity)
_CONFIDENCES = tuple(Confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong on some ranks.

    Attributes:
        ranks: The ranks, ascending.
        text: What was seen there and what was expected, in words that follow a colon; no full stop.
        badness: The higher, the earlier it is told.
        severity: How bad it is for the run.
        confidence: How sure the facts make us.
    """

    ranks: tuple[int, ...]
    text: str
    badness: float = 0.0
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.CERTAIN


Check = Callable[[Checked], Iterable[Problem]]


def check(
    *, after: str = "", remedy: str, source: str = "host", plan: Plan = Plan.UNKNOWN
) -> Callable[[Check], Rule[Checked]]:
    """Makes a rule of a function that gives problems: all of them are one finding, the worst first.

    Args:
        after: The check behind which it stands.
        remedy: What to do.
        source: Where the evidence comes from.
        plan: What the next start is to do about it.
    """

    def register(ask: Check) -> Rule[Checked]:
        @wraps(ask)
        def together(view: Checked) -> Iterator[Finding]:
            if told := _merged(ask(view)):
                yield _finding(view, told, source)

        return preflight_rule(after=after, remedy=remedy, plan=plan)(together)

    return register


def _merged(problems: Iterable[Problem]) -> list[Problem]:
    """Problems in the same words as one, the worst first."""
    alike: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        alike[problem.text].append(problem)
    merged = [
        Problem(
            ranks=tuple(sorted({rank for problem in same for rank in problem.ranks})),
            text=text,
            badness=max(problem.badness for problem in same),
            severity=min((problem.severity for problem in same), key=_SEVERITIES.index),
            confidence=min((problem.confidence for problem in same), key=_CONFIDENCES.index),
        )
        for text, same in alike.items()
    ]
    return sorted(merged, key=lambda one: (_SEVERITIES.index(one.severity), -one.badness, one.ranks))


def _finding(view: Checked, told: list[Problem], source: str) -> Finding:
    more = [f"{len(told) - _LISTED:,} more in the evidence"] if len(told) > _LISTED else []
    return Finding(
        rule="",
        severity=told[0].severity,
        confidence=min((problem.confidence for problem in told), key=_CONFIDENCES.index),
        summary=capitalised("; ".join([*_parts(view, told[:_LISTED]), *more])) + ".",
        ranks=tuple(sorted({rank for problem in told for rank in problem.ranks})),
        evidence=tuple(_evidence(view, problem, source) for problem in told[:_EVIDENCE]),
        remedy="",
    )


def _parts(view: Checked, told: list[Problem]) -> Iterator[str]:
    """Each problem after the place where it is, which is not repeated."""
    before: tuple[int, ...] = ()
    for problem in told:
        yield problem.text if problem.ranks == before else f"{view.where(problem.ranks)}: {problem.text}"
        before = problem.ranks


def _evidence(view: Checked, problem: Problem, source: str) -> Evidence:
    return Evidence(
        source=source,
        rank=problem.ranks[0] if len(problem.ranks) == 1 else None,
        text=f"{capitalised(view.where(problem.ranks))}: {problem.text}.",
    )
