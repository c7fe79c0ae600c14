"""A diagnosis as one page for a browser: the answer first, then a picture, then all facts.

The page is one file that loads and runs nothing: its content security policy only admits its own style sheet.
"""

import base64
import hashlib
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.html.answer import causes_of
from lightning_ncclsafe.report.html.facts import raw_facts, silent_words
from lightning_ncclsafe.report.html.picture import picture
from lightning_ncclsafe.report.html.stacks import stacks_of
from lightning_ncclsafe.report.html.tables import tables_of
from lightning_ncclsafe.report.json import plan_words
from lightning_ncclsafe.report.lines import glued, moment_words, safe
from lightning_ncclsafe.report.ranks import (
    RankStates,
    named_ranks,
    recorded_table,
    short_path,
)
from lightning_ncclsafe.report.text import answer_lines, incident_words, nothing_found
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.planning import next_start

_FOLDER = Path(__file__).parent
_PAGE = "page.html.jinja"
_STYLE = "page.css"


def render_html(diagnosis: Diagnosis, *, most_s: float | None = None) -> str:
    """Renders the page.

    Args:
        most_s: Time limit, seconds; None for no limit.

    Raises:
        TimeoutError: If it takes longer.
    """
    give_up = time.monotonic() + most_s if most_s is not None else float("inf")
    shown: dict[str, Any] = {}
    for name, value in _shown(diagnosis):
        shown[name] = value
        _check(give_up)
    parts = []
    for part in _template().generate(shown):
        parts.append(part)
        _check(give_up)
    return "".join(parts)


def _check(give_up: float) -> None:
    if time.monotonic() > give_up:
        raise TimeoutError("it took too long")


def _shown(diagnosis: Diagnosis) -> Iterator[tuple[str, Any]]:
    """The variables of the template, one by one."""
    job, view = diagnosis.job, Timeline(diagnosis.job)
    hangs, alike = not job.is_compared, RankStates(view)
    yield "incident", job.incident
    yield "began", moment_words(job.incident.opened_ns)
    yield "next_start", plan_words(start) if (start := next_start(diagnosis)) else ""
    yield "launch", job.launch
    yield "opening", incident_words(diagnosis)
    yield "nothing", "" if diagnosis.findings else nothing_found(diagnosis)
    yield "unanswered", diagnosis.unanswered
    yield "picture", picture(diagnosis, alike) if hangs else None
    yield "recorded", list(recorded_table(job, named_ranks(diagnosis))) if job.is_recorded else []
    stacks = stacks_of(diagnosis) if hangs else None
    yield "stacks", stacks
    facts = raw_facts(diagnosis, alike, stacks.number_of if stacks else {})
    yield "facts", facts
    tables = list(tables_of(diagnosis, view))
    yield "tables", tables
    lines = (*answer_lines(diagnosis), safe(incident_words(diagnosis)))
    yield "text", Markup("".join(f"{escape(line)}\n" for line in lines))
    yield "causes", causes_of(diagnosis, view, facts.place, {table.name for table in tables})
    yield "silent", list(silent_words(alike))
    yield "style", _style()
    yield "style_hash", base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        # Control characters and marks that reorder text are written out.
        finalize=lambda value: value if isinstance(value, Markup) else safe(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {"short_path": short_path, "prose": _prose}
    environment.filters |= filters
    return environment.get_template(_PAGE)


@lru_cache(maxsize=1)
def _style() -> Markup:
    """The style sheet, which must not be escaped."""
    return Markup((_FOLDER / _STYLE).read_text(encoding="utf-8"))


def _prose(text: str) -> Markup:
    """A sentence, with code between backticks marked up."""
    parts = safe(text).split("`")
    if len(parts) % 2 == 0:
        return escape(_glued("`".join(parts)))
    # Code is copied: its spaces stay what they are.
    marked = (
        Markup("<code>{}</code>").format(part) if number % 2 else escape(_glued(part))
        for number, part in enumerate(parts)
    )
    return Markup("").join(marked)


def _glued(text: str) -> str:
    return glued(text, "\u00a0")
