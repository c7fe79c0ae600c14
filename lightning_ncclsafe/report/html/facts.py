"""The facts of each rank on the page, so that every sentence can be checked; facts of any kind in words.

If there are many ranks, those that evidence is about and one of each group of equal ones are shown in full; report.json
has all.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from lightning_ncclsafe.facts import Frame, RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.facts.wording import capitalised, duration_words, ranks_words, short_location, size_words
from lightning_ncclsafe.report.ranks import RankStates
from lightning_ncclsafe.report.tables.data import rank_numbers

_LONGEST = 2_000
_MOST_LISTED = 40
_MOST_FRAMES = 4
_JOINED = "\u00a0"

Words = Callable[[Any], str]


def _moment(ns: int) -> str:
    """``"16:34:29.470"``, UTC; the number itself if it is out of range."""
    try:
        return f"{datetime.fromtimestamp(ns / 1e9, tz=timezone.utc):%H:%M:%S.%f}"[:-3] if ns else ""
    except (OverflowError, ValueError, OSError):
        return str(ns)


def _plain(value: float) -> str:
    """Whole numbers unchanged: they may be identifiers."""
    return f"{value}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:.4g}"


def _seconds(value: float) -> str:
    return f"{value:,.3f} s" if abs(value) < 9.95 else duration_words(value)


# The longest matching suffix counts.
_UNITS: tuple[tuple[str, Words], ...] = (
    ("_bytes_per_s", lambda value: f"{size_words(int(value))}/s"),
    ("_bytes", lambda value: size_words(int(value))),
    ("_ms", lambda value: f"{value:,.3f} ms" if abs(value) < 1e3 else duration_words(value / 1e3)),
    ("_ns", _moment),
    ("_s", _seconds),
    ("_w", lambda value: f"{value:,.0f} W"),
)


def label_of(name: str) -> str:
    """A field's name in words: ``"memory total"`` for ``memory_total_bytes``."""
    ending = next((ending for ending, _ in _UNITS if name.endswith(ending) and name != ending), "")
    return name.removesuffix(ending).replace("_", " ")


def value_words(name: str, value: Any) -> str:
    """A field's value in words; empty if it means nothing.

    Args:
        name: Name of the field; its suffix is the unit.
    """
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (int, float)):
        # A number and its unit stay on one line.
        return next((words(value) for ending, words in _UNITS if name.endswith(ending)), _plain(value)).replace(
            " ", _JOINED
        )
    text = value if isinstance(value, str) else _nested_words(name, value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _nested_words(name: str, value: Any) -> str:
    if isinstance(value, Frame):
        return short_location(value)
    if is_dataclass(value):
        return ", ".join(words if label == "name" else f"{label} {words}" for label, _, words in pairs(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={value_words(str(key), item)}" for key, item in value.items())
    if name == "ranks":
        return rank_numbers(value)
    return _listed(name, tuple(value))


def _listed(name: str, items: tuple[Any, ...]) -> str:
    """The innermost frames, or the first of anything else."""
    if items and isinstance(items[0], Frame):
        inner = " ← ".join(short_location(frame) for frame in reversed(items[-_MOST_FRAMES:]))
        return inner if len(items) <= _MOST_FRAMES else f"{inner} ← {len(items) - _MOST_FRAMES} more"
    if items and isinstance(items[0], tuple) and name.endswith("sizes"):
        # Shapes.
        return ", ".join(" \u00d7 ".join(map(str, shape)) or "1" for shape in items[:_MOST_LISTED])
    shown = [value_words(name, item) for item in items[:_MOST_LISTED]]
    more = [f"… {len(items) - _MOST_LISTED} more"] if len(items) > _MOST_LISTED else []
    return ("; " if any(" " in words for words in shown) else ", ").join([*filter(None, shown), *more])


def pairs(facts: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Name, value and words of every field that means something; nested ones follow their own name."""
    for field in fields(facts):
        value = _known(facts, field)
        if is_dataclass(value) and not isinstance(value, Frame):
            yield from pairs(value, f"{prefix}{label_of(field.name)}: ")
        elif words := value_words(field.name, value):
            yield f"{prefix}{label_of(field.name)}", value, words


def _known(facts: Any, field: Field[Any]) -> Any:
    """The value of a field; None for the number that stands for none or unknown."""
    value = getattr(facts, field.name)
    return None if value == -1 and field.default == -1 else value


def table_of(items: tuple[Any, ...], leave_out: frozenset[str] = frozenset()) -> tuple[list[str], list[list[str]]]:
    """Titles and rows for facts of one kind, without empty columns."""
    shown = [field for field in fields(items[0]) if field.name not in leave_out]
    names = [field.name for field in shown]
    rows = [[value_words(field.name, _known(item, field)) for field in shown] for item in items]
    kept = [column for column in range(len(names)) if any(row[column] for row in rows)]
    return [label_of(names[column]) for column in kept], [[row[column] for column in kept] for row in rows]


def nothing_in(items: tuple[Any, ...]) -> frozenset[str]:
    """Names of fields that are empty, zero or false in all facts."""
    return frozenset(field.name for field in fields(items[0]) if not any(getattr(item, field.name) for item in items))


_MOST_IN_FULL = 40
_MOST_ROWS = 2_048
_MOST_ITEMS = 200

# The fields of RankFacts behind each source of observations, in the order of preference.
_FIELDS_OF = {
    "flight recorder": ("collectives", "groups"),
    "stack": ("stack", "exception"),
    "source code": ("stack", "exception"),
    "phase": ("progress",),
    "host": ("host_facts", "machine", "preflight"),
    "process": ("workers", "peers", "host_facts"),
    "exception": ("exception", "failed_save"),
    "loader": ("loaders", "data", "workers"),
    "storage": ("storage", "loggers"),
    "collective times": ("stragglers",),
    "log": ("record",),
    "counters": ("groups",),
    "network": ("exception", "machine", "peers"),
    "gpu": ("machine",),
    "logger": ("loggers",),
    "steps": ("steps",),
    "parameters": ("units", "steps"),
    "settings": ("machine", "preflight"),
    "size": ("collectives",),
}

# Identity of the process, and when it was asked.
_IDENTITY = ("rank", "local_rank", "local_world_size", "host", "pid", "taken_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One field of a rank's facts.

    Attributes:
        name: Name of the field, which is part of its place on the page.
        pairs: Names and values, if it is one thing.
        columns: Titles of a table, if it is a list of things.
        rows: Its rows.
        left_out: Number of rows that are left out.
        stack: Number of the stack on the page, if this is one that is shown there.
    """

    name: str
    title: str
    pairs: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    left_out: int = 0
    stack: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDetails:
    """All facts of one rank."""

    rank: int
    title: str
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank as a row of the table.

    Attributes:
        rank: The rank.
        cells: Host, process, place, idle time, and what it does.
        full: The equal rank that is shown in full, which may be this one; None if there is none.
    """

    rank: int
    cells: tuple[str, ...]
    full: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFacts:
    """The facts of all ranks.

    Attributes:
        details: Ranks that are shown in full, ascending.
        rows: The ranks that answered, up to a limit.
        left_out: Number of ranks without a row.
        silent: Ranks that did not answer, with what others saw of them.
    """

    details: tuple[RankDetails, ...]
    rows: tuple[Row, ...]
    left_out: int
    silent: frozenset[int] = frozenset()

    def place(self, rank: int, source: str) -> str:
        """The place on the page for an observation of this source on this rank; empty if there is none."""
        if rank in self.silent:
            return "silent"
        sections = next((facts.sections for facts in self.details if facts.rank == rank), None)
        if sections is None:
            return f"rank-{rank}" if any(row.rank == rank for row in self.rows) else ""
        there = {section.name for section in sections}
        field = next((field for field in _FIELDS_OF.get(source, ()) if field in there), "")
        return f"rank-{rank}-{field}" if field else f"rank-{rank}"


def raw_facts(diagnosis: Diagnosis, alike: RankStates, stack_of: dict[int, int]) -> RawFacts:
    """Collects the facts of all ranks.

    Args:
        stack_of: Number on the page of each rank's stack.
    """
    view, groups = alike.view, alike.groups()
    # The ranks that sentences on the page are about; those of the first finding first.
    wanted: list[int] = []
    for finding in diagnosis.findings:
        wanted += finding.ranks[:4]
        wanted += [item.rank for item in finding.evidence if item.rank is not None]
    wanted += [ranks[0] for ranks in groups]
    chosen = list(dict.fromkeys(rank for rank in wanted if rank in view.facts))[:_MOST_IN_FULL]
    like: dict[int, int | None] = {}
    for ranks in groups:
        like |= dict.fromkeys(ranks, next(filter(frozenset(ranks).__contains__, chosen), None))
    shown = sorted(view.facts)[:_MOST_ROWS]
    return RawFacts(
        details=tuple(_details(view.facts[rank], stack_of.get(rank, 0)) for rank in sorted(chosen)),
        rows=tuple(_row(alike, rank, rank if rank in chosen else like[rank]) for rank in shown),
        left_out=len(view.facts) - len(shown),
        silent=frozenset(view.silent),
    )


def _row(alike: RankStates, rank: int, full: int | None) -> Row:
    facts = alike.view.facts[rank]
    cells = (
        facts.host,
        str(facts.pid or ""),
        ", ".join(filter(None, [facts.progress.phase.value, alike.batch(rank)])),
        duration_words(facts.progress.idle_s),
        capitalised(alike.states[rank]),
    )
    return Row(rank=rank, cells=cells, full=full)


def _details(facts: RankFacts, stack: int) -> RankDetails:
    identity = {name: value_words(name, getattr(facts, name)) for name in _IDENTITY}
    shown = tuple((label_of(name), words) for name, words in identity.items() if words)
    process = Section(name="process", title="Process", pairs=shown)
    title = " · ".join(filter(None, [f"Rank {facts.rank}", facts.host, f"pid {facts.pid}" if facts.pid else ""]))
    sections = (_section(field.name, getattr(facts, field.name), facts, stack) for field in fields(facts))
    return RankDetails(
        rank=facts.rank, title=title, sections=(process, *(section for section in sections if section is not None))
    )


def _section(name: str, value: Any, facts: RankFacts, stack: int) -> Section | None:
    if name in _IDENTITY or value in (None, (), {}, ""):
        return None
    title = capitalised(label_of(name))
    if name == "stack" and stack and facts.exception is None:
        return Section(name=name, title=title, stack=stack)
    if is_dataclass(value):
        shown = tuple((label, words) for label, _, words in pairs(value))
        return Section(name=name, title=title, pairs=shown) if shown else None
    if isinstance(value, tuple) and is_dataclass(value[0]):
        columns, rows = table_of(value[-_MOST_ITEMS:])
        left_out = max(len(value) - _MOST_ITEMS, 0)
        return Section(name=name, title=title, columns=tuple(columns), rows=tuple(map(tuple, rows)), left_out=left_out)
    words = value_words(name, value)
    return Section(name=name, title=title, pairs=(("", words),)) if words else None


def silent_words(alike: RankStates) -> Iterator[tuple[str, str]]:
    """Ranks that did not answer, and what others saw of them, up to a limit."""
    view = alike.view
    for rank in view.silent[:_MOST_ITEMS]:
        process = view.witnesses.get(rank)
        yield f"Rank {rank}", alike.silence(rank) + (f": {value_words('process', process)}" if process else "")
    if len(view.silent) > _MOST_ITEMS:
        yield capitalised(ranks_words(view.silent[_MOST_ITEMS:])), "and others like it"
