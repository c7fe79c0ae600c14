"""What rules about hosts find on single ranks or hosts, put together to one finding, however many they are."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.kit.hosts import Checked
from lightning_ncclsafe.rules.kit.wording import capitalised

_LISTED = 3
_EVIDENCE = 8
_SEVERITIES = tuple(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong on some ranks.

    Attributes:
        ranks: The ranks, ascending.
        text: What was seen there and what was expected, in words that follow a colon; no full stop.
        badness: The higher, the earlier it is told.
        severity: How bad it is for the run.
    """

    ranks: tuple[int, ...]
    text: str
    badness: float = 0.0
    severity: Severity = Severity.WARNING


def findings(
    view: Checked,
    rule: str,
    problems: Iterable[Problem],
    remedy: str,
    *,
    source: str = "host",
    confidence: Confidence = Confidence.CERTAIN,
) -> Iterator[Finding]:
    """One finding of all the problems, the worst first; none where there is no problem.

    Args:
        view: What the ranks have found.
        rule: Name of the cause.
        problems: What is wrong; those in the same words are told once.
        remedy: What to do.
        source: Where the evidence comes from.
        confidence: How sure the facts make us.
    """
    told = _merged(problems)
    if not told:
        return
    more = [f"{len(told) - _LISTED:,} more in the evidence"] if len(told) > _LISTED else []
    yield Finding(
        rule=rule,
        severity=min((problem.severity for problem in told), key=_SEVERITIES.index),
        confidence=confidence,
        summary=capitalised("; ".join([*_parts(view, told[:_LISTED]), *more])) + ".",
        ranks=tuple(sorted({rank for problem in told for rank in problem.ranks})),
        evidence=tuple(_evidence(view, problem, source) for problem in told[:_EVIDENCE]),
        remedy=remedy,
    )


def _parts(view: Checked, told: list[Problem]) -> Iterator[str]:
    """Each problem after the place where it is, which is not repeated."""
    before: tuple[int, ...] = ()
    for problem in told:
        yield problem.text if problem.ranks == before else f"{view.where(problem.ranks)}: {problem.text}"
        before = problem.ranks


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
        )
        for text, same in alike.items()
    ]
    return sorted(merged, key=lambda one: (_SEVERITIES.index(one.severity), -one.badness, one.ranks))


def _evidence(view: Checked, problem: Problem, source: str) -> Evidence:
    return Evidence(
        source=source,
        rank=problem.ranks[0] if len(problem.ranks) == 1 else None,
        text=f"{capitalised(view.where(problem.ranks))}: {problem.text}.",
    )
