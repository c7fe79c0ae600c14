"""What the ranks present of their data side by side, and the text of the exception that says that they disagree."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding, Severity
from lightning_ncclsafe.report.lines import cut, wrapped
from lightning_ncclsafe.report.safe import safe
from lightning_ncclsafe.report.tables.data_rows import Row, table_rows
from lightning_ncclsafe.rules.kit.data import JobData, JobLoader
from lightning_ncclsafe.rules.kit.wording import ranks_words

_FEW_LOADERS = 4
_MOST_ANSWERS = 4
_MOST_LINES = 60
_WIDEST_CELL = 72


def data_table(job: JobFacts) -> Iterator[str]:
    """One table for each loader, or, where there are many, for each in which ranks differ; ranks alike share a row.

    Which ranks differ from most others is said per column. Data of a rank's own is not counted as a difference.
    """
    view = JobData(job)
    hosts = {facts.rank: facts.host for facts in job.ranks}
    tables = [(loader, *table_rows(loader, hosts)) for loader in view.loaders]
    if len(tables) > _FEW_LOADERS:
        # A title row and one for all ranks: nothing differs. The sort is stable.
        tables.sort(key=lambda table: len(table[1]) <= 2)
    for loader, rows, left_out in tables[:_FEW_LOADERS]:
        yield from _table(loader, rows, left_out)
    if len(tables) > _FEW_LOADERS:
        yield f"… {len(tables) - _FEW_LOADERS:,} more loaders are in report.json"
    if view.silent:
        yield f"{ranks_words(view.silent)}: never presented"


def _table(loader: JobLoader, rows: list[Row], left_out: int) -> Iterator[str]:
    yield safe(loader.name)
    cells = [[_short(safe(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
    if left_out:
        yield f"  … {left_out:,} more"


def _short(cell: str) -> str:
    return cell if len(cell) <= _WIDEST_CELL else f"{cell[: _WIDEST_CELL - 1]}…"


def render_mismatch(diagnosis: Diagnosis) -> str:
    """Why ranks cannot go on with their data: what is wrong, all ranks side by side, and what to do.

    Where nothing is wrong, what is conspicuous is said in the same way.
    """
    errors = [finding for finding in diagnosis.findings if finding.severity is Severity.ERROR]
    told = errors or list(diagnosis.findings)
    answers = [line for finding in told[:_MOST_ANSWERS] for line in wrapped(cut(_answer(finding))).splitlines()]
    if len(told) > _MOST_ANSWERS:
        answers.append(f"… {len(told) - _MOST_ANSWERS:,} more findings are in the report")
    remedy = [line for finding in told[:1] for line in wrapped(cut(f"What to do: {finding.remedy}")).splitlines()]
    table = list(data_table(diagnosis.job))
    room = _MOST_LINES - len(answers) - len(remedy) - 1
    if len(table) > room:
        table = [*table[:room], "… the whole table is in the report"]
    return "\n".join([*answers, *table, *remedy])


def _answer(finding: Finding) -> str:
    return f"{finding.rule}: {finding.summary}"
