"""What is wrong with the hosts of a job, each with its remedy, and a table of what differs between ranks."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding, Severity
from lightning_ncclsafe.report.lines import section, wrapped
from lightning_ncclsafe.report.safe import safe
from lightning_ncclsafe.report.tables.preflight_columns import steady
from lightning_ncclsafe.report.tables.preflight_measures import measured
from lightning_ncclsafe.rules.kit.data import Groups, grouped
from lightning_ncclsafe.rules.kit.hosts import Checked
from lightning_ncclsafe.rules.kit.wording import ranks_words

_LONGEST_SUMMARY = 480
_MOST_ROWS = 8
_MOST_COLUMNS = 8
_WIDEST_CELL = 28
_MOST_UNKNOWN = 2
_MOST_VALUES = 12
_UNKNOWN = "unknown"


def render_preflight(diagnosis: Diagnosis) -> str:
    """One line for each finding with its remedy, errors first, then what differs between ranks; fewer than 40 lines.

    Empty where nothing is wrong and nothing differs.
    """
    lines = [_line(finding) for finding in _ordered(diagnosis)]
    lines += preflight_table(diagnosis.job)
    if lines:
        lines += [f"not known: {line}" for line in diagnosis.unanswered[:_MOST_UNKNOWN]]
    return "\n".join(safe(line) for line in lines)


def render_preflight_all(diagnosis: Diagnosis) -> str:
    """Everything: findings with all their evidence, each question with the ranks' answers, and what is not known."""
    view = Checked(diagnosis.job)
    parts = [
        *(_full(finding) for finding in _ordered(diagnosis)),
        "" if diagnosis.findings else f"Nothing is wrong with the hosts of {ranks_words(view.facts)}.",
        section("What the ranks have found", _answers(view)),
        section("What could not be found out", (f"- {line}" for line in diagnosis.unanswered)),
    ]
    return "\n\n".join(part for part in parts if part)


def preflight_table(job: JobFacts) -> list[str]:
    """Only the columns in which ranks differ; ranks that are alike share a row. Empty where nothing differs."""
    view = Checked(job)
    answers = {name: groups for name, groups in steady(view).items() if groups.differ}
    if not answers:
        return []
    shown = dict(list(answers.items())[:_MOST_COLUMNS])
    rows, left_out = _rows(view, shown)
    lines = list(_aligned(rows))
    lines += [f"  … {left_out:,} more rows are in ncclsafe preflight --all"] if left_out else []
    hidden = list(answers)[_MOST_COLUMNS:]
    return lines + ([f"  … {_shortest(hidden)} {'differs' if len(hidden) == 1 else 'differ'} too"] if hidden else [])


def _ordered(diagnosis: Diagnosis) -> list[Finding]:
    severities = tuple(Severity)
    return sorted(diagnosis.findings, key=lambda finding: severities.index(finding.severity))


def _line(finding: Finding) -> str:
    summary = finding.summary
    if len(summary) > _LONGEST_SUMMARY:
        summary = f"{summary[: _LONGEST_SUMMARY - 1]}…"
    return f"{finding.severity.value}: {finding.rule}: {summary} What to do: {finding.remedy}"


def _full(finding: Finding) -> str:
    lines = [wrapped(f"{finding.severity.value}: {finding.rule}, {ranks_words(finding.ranks)}")]
    lines += [wrapped(f"- {item.text}", "   ") for item in finding.evidence] or [wrapped(finding.summary, "   ")]
    return "\n".join([*lines, wrapped(f"What to do: {finding.remedy}", "   ")])


def _answers(view: Checked) -> Iterator[str]:
    for name, groups in steady(view, every=True).items():
        told = [part for part in groups.parts if part[0]]
        words = [f"{value} on {ranks_words(ranks)}" for value, ranks in told[:_MOST_VALUES]]
        more = len(told) - _MOST_VALUES
        yield f"- {name}: {', '.join([*words, *([f'{more:,} more'] if more > 0 else [])]) or _UNKNOWN}"
    for name, text in measured(view):
        yield f"- {name}: {text}"


def _rows(view: Checked, shown: dict[str, Groups[str]]) -> tuple[list[tuple[str, ...]], int]:
    cells: dict[int, list[str]] = {rank: [] for rank in view.facts}
    for groups in shown.values():
        for value, ranks in groups.parts:
            for rank in ranks:
                cells[rank].append(value or _UNKNOWN)
    alike = grouped({rank: tuple(values) for rank, values in cells.items()}).parts
    told = [(_ranks(ranks), _hosts(view, ranks), *values) for values, ranks in alike[:_MOST_ROWS]]
    return [("rank", "host", *shown), *told], len(alike) - len(told)


def _ranks(ranks: tuple[int, ...]) -> str:
    return ranks_words(ranks).partition(" ")[2]


def _hosts(view: Checked, ranks: tuple[int, ...]) -> str:
    names = {view.names[rank] for rank in ranks}
    return f"{len(names):,} hosts" if len(names) > 1 else next(iter(names)) or _UNKNOWN


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    cells = [[_short(safe(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


def _short(cell: str) -> str:
    return cell if len(cell) <= _WIDEST_CELL else f"{cell[: _WIDEST_CELL - 1]}…"


def _shortest(names: list[str]) -> str:
    more = len(names) - _MOST_COLUMNS
    return ", ".join([*map(_short, names[:_MOST_COLUMNS]), *([f"{more:,} more"] if more > 0 else [])])
