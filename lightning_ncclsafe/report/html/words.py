"""Facts of any kind in words: names without units, values with them, unknown ones left out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.rules.kit.wording import duration_words, ranks_words, short_location, size_words

_LONGEST = 2_000
_MOST_ITEMS = 40
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
    """A field's value in words; empty if it says nothing.

    Args:
        name: Name of the field; its suffix is the unit.
        value: Its value, of any type that facts have.
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
        return ranks_words(value).partition(" ")[2] if value else ""
    return _listed(name, tuple(value))


def _listed(name: str, items: tuple[Any, ...]) -> str:
    """The innermost frames, or the first of anything else."""
    if items and isinstance(items[0], Frame):
        inner = " ← ".join(short_location(frame) for frame in reversed(items[-_MOST_FRAMES:]))
        return inner if len(items) <= _MOST_FRAMES else f"{inner} ← {len(items) - _MOST_FRAMES} more"
    if items and isinstance(items[0], tuple):
        # Shapes.
        return ", ".join(" \u00d7 ".join(map(str, shape)) or "1" for shape in items[:_MOST_ITEMS])
    shown = [value_words(name, item) for item in items[:_MOST_ITEMS]]
    more = [f"… {len(items) - _MOST_ITEMS} more"] if len(items) > _MOST_ITEMS else []
    return ("; " if any(" " in words for words in shown) else ", ").join([*filter(None, shown), *more])


def pairs(facts: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Name, value and words of every field that says something; nested ones follow their own name."""
    for field in fields(facts):
        value = getattr(facts, field.name)
        if is_dataclass(value) and not isinstance(value, Frame):
            yield from pairs(value, f"{prefix}{label_of(field.name)}: ")
        elif words := value_words(field.name, value):
            yield f"{prefix}{label_of(field.name)}", value, words


def table_of(items: tuple[Any, ...], leave_out: frozenset[str] = frozenset()) -> tuple[list[str], list[list[str]]]:
    """Titles and rows for facts of one kind, without empty columns."""
    names = [field.name for field in fields(items[0]) if field.name not in leave_out]
    rows = [[value_words(name, getattr(item, name)) for name in names] for item in items]
    kept = [column for column in range(len(names)) if any(row[column] for row in rows)]
    return [label_of(names[column]) for column in kept], [[row[column] for column in kept] for row in rows]


def nothing_in(items: tuple[Any, ...]) -> frozenset[str]:
    """Names of fields that are empty, zero or false in all facts."""
    return frozenset(field.name for field in fields(items[0]) if not any(getattr(item, field.name) for item in items))
