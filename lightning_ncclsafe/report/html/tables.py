"""Ranks side by side, as tables of a page: process groups, hosts and machines, loaders, data, preflight."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.facts.wording import call_words, ranks_words
from lightning_ncclsafe.report.html.facts import nothing_in, pairs, table_of
from lightning_ncclsafe.report.lines import first_of
from lightning_ncclsafe.report.tables.data import rank_numbers, table_rows
from lightning_ncclsafe.report.tables.preflight import measured, steady
from lightning_ncclsafe.rules.kit.data import JobData
from lightning_ncclsafe.rules.kit.hosts import JobHosts
from lightning_ncclsafe.rules.kit.timeline import GroupView, Timeline

# Each has its own column.
_FEW_RANKS = 4
_MOST_NAMED = 2
_MOST_ROWS = 40
_MOST_VALUES = 4
_MOST_LOADERS = 8
# What differs on every rank, so that no two ranks would share a row; and what the first column shows.
_OWN = frozenset({"rank", "pid", "cpu_s", "rss_bytes", "memory_growth_bytes_per_s"})
# Of more rows, equal ones are not merged.
_MOST_THINGS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the page.

    Attributes:
        name: Its place on the page.
        left_out: Rows for which there is no room.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0


def tables_of(diagnosis: Diagnosis, view: Timeline) -> Iterator[Table]:
    """All tables that are not empty."""
    named = [rank for finding in diagnosis.findings[:1] for rank in finding.ranks if rank in view.facts]
    made = [
        *_data(view),
        *_preflight(view),
        # Ranks that are compared before they train do not hang.
        *([] if diagnosis.job.is_compared else [_groups(view)]),
        _compared("hosts", "Hosts and processes", view, named, lambda facts: facts.host_facts),
        _compared("machines", "Machines and GPUs", view, named, lambda facts: facts.machine),
        _listed("loaders", "Dataloaders", view, named, lambda facts: facts.loaders),
        _listed("workers", "Worker processes of dataloaders", view, named, lambda facts: facts.workers),
        _listed("loggers", "Loggers off the training thread", view, named, lambda facts: facts.loggers),
        _listed("storage", "Directories", view, named, lambda facts: facts.storage),
    ]
    return (table for table in made if table.rows)


def _groups(view: Timeline) -> Table:
    rows = [_group_row(view, group) for group in view.groups]
    columns = ("group", "ranks", "last called", "stands at", "what it is", "behind", "waiting")
    return Table(
        name="groups",
        title="How far each process group has come",
        columns=columns,
        rows=tuple(rows[:_MOST_ROWS]),
        left_out=max(len(rows) - _MOST_ROWS, 0),
    )


def _group_row(view: Timeline, group: GroupView) -> tuple[str, ...]:
    known = (facts for rank in group.enqueued for facts in view.facts[rank].groups if facts.name == group.name)
    description = next((facts.description for facts in known if facts.description), "")
    called = sorted(group.enqueued.values())
    return (
        f"{group.name} ({description})" if description else group.name,
        rank_numbers(group.members),
        "" if not called else (f"{called[0]}" if called[0] == called[-1] else f"{called[0]} to {called[-1]}"),
        "nothing outstanding" if group.seq is None else f"{group.seq}",
        _called(view, group),
        rank_numbers(group.behind),
        rank_numbers(group.oldest),
    )


def _called(view: Timeline, group: GroupView) -> str:
    """What ranks have called under the number at which a group stands; with the ranks if they differ."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank in group.oldest:
        calls = view.facts[rank].collectives
        at = next((call for call in calls if call.group == group.name and call.seq == group.seq), None)
        if at is not None:
            alike[call_words(at)].append(rank)
    if len(alike) < 2:
        return next(iter(alike), "")
    ordered = sorted(alike.items(), key=lambda item: (len(item[1]), item[1]))
    return "; ".join(first_of([f"{words} on {ranks_words(ranks)}" for words, ranks in ordered], _MOST_VALUES))


def _compared(name: str, title: str, view: Timeline, named: Sequence[int], part: Callable[[RankFacts], Any]) -> Table:
    """One row per fact: its value on each rank if they are few, else on named ranks and as a range."""
    values: dict[str, dict[int, tuple[Any, str]]] = defaultdict(dict)
    for rank in sorted(view.facts):
        for label, value, words in pairs(part(view.facts[rank])):
            values[label][rank] = value, words
    few = sorted(view.facts) if len(view.facts) <= _FEW_RANKS else [*named[:_MOST_NAMED]]
    ranged = len(view.facts) > _FEW_RANKS
    rows = []
    for label, by_rank in values.items():
        if not any(value for value, _ in by_rank.values()):
            continue
        cells = [by_rank[rank][1] if rank in by_rank else "" for rank in few]
        rows.append((label, *cells, *([_range(by_rank)] if ranged else [])))
    columns = ("", *(f"rank {rank}" for rank in few), *(["all ranks"] if ranged else []))
    return Table(name=name, title=title, columns=columns, rows=tuple(rows))


def _range(by_rank: dict[int, tuple[Any, str]]) -> str:
    """``"1.2 GB (rank 3) to 4.0 GB (rank 0)"`` for numbers; for all else the values with their ranks."""
    numbers = {
        rank: value
        for rank, (value, _) in by_rank.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if len(numbers) == len(by_rank):
        low, high = min(numbers, key=lambda rank: numbers[rank]), max(numbers, key=lambda rank: numbers[rank])
        least, most = by_rank[low][1], by_rank[high][1]
        return least if least == most else f"{least} (rank {low}) to {most} (rank {high})"
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, (_, words) in by_rank.items():
        alike[words].append(rank)
    ordered = sorted(alike.items(), key=lambda item: (len(item[1]), item[1]))
    return "; ".join(first_of([f"{words} ({ranks_words(ranks)})" for words, ranks in ordered], _MOST_VALUES))


def _listed(
    name: str, title: str, view: Timeline, named: Sequence[int], part: Callable[[RankFacts], tuple[Any, ...]]
) -> Table:
    """One row per thing of this kind, those of the named ranks first; equal ones of several ranks share a row."""
    ranks = [*named, *(rank for rank in sorted(view.facts) if rank not in set(named))]
    things = [*islice(((rank, thing) for rank in ranks for thing in part(view.facts[rank])), _MOST_THINGS)]
    if not things:
        return Table(name=name, title=title, columns=(), rows=())
    kinds = tuple(thing for _, thing in things)
    own = _OWN if len(view.facts) > _FEW_RANKS else frozenset({"rank"})
    columns, cells = table_of(kinds, nothing_in(kinds) | own)
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for (rank, _), row in zip(things, cells, strict=True):
        alike[tuple(row)].append(rank)
    rows = [(rank_numbers(those), *row) for row, those in alike.items()]
    left_out = max(len(rows) - _MOST_ROWS, 0)
    return Table(name=name, title=title, columns=("rank", *columns), rows=tuple(rows[:_MOST_ROWS]), left_out=left_out)


def _data(view: Timeline) -> Iterator[Table]:
    """The data of the ranks."""
    hosts = {rank: facts.host for rank, facts in view.facts.items()}
    for number, loader in enumerate(JobData(view.job).loaders[:_MOST_LOADERS], 1):
        (titles, *rows), left_out = table_rows(loader, hosts)
        yield Table(
            name=f"data-{number}", title=f"Data: {loader.name}", columns=titles, rows=tuple(rows), left_out=left_out
        )


def _preflight(view: Timeline) -> Iterator[Table]:
    """What ranks found on their hosts; differences first."""
    checked = JobHosts(view.job)
    if not checked.facts:
        return
    answers = sorted(steady(checked, every=True).items(), key=lambda item: not item[1].differ)
    rows = [
        (name, "; ".join(f"{value} ({ranks_words(ranks)})" for value, ranks in groups.parts[:_MOST_VALUES] if value))
        for name, groups in answers
    ]
    rows = [row for row in rows if row[1]]
    yield Table(name="preflight", title="What ranks have found", columns=("", "all ranks"), rows=tuple(rows))
    ranges = tuple(measured(checked))
    yield Table(name="measured", title="What was measured", columns=("", "all ranks"), rows=ranges)
