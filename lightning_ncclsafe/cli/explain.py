"""``ncclsafe explain``: what a cause means, how it shows, what to do about it, and what cannot be detected."""

import io
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, TextIO

from jsonargparse import ArgumentParser, Namespace
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_ncclsafe.cli import failed, say
from lightning_ncclsafe.report.terminal import console_for
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.kit import Rule
from lightning_ncclsafe.rules.preflight import PREFLIGHT_RULES
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

HELP = "explain a cause: what it means, and what to do"
DESCRIPTION = (
    "Explains a cause that a report names: symptom, cause, remedy, and what cannot be seen. Exit code: 0, or 2 if there"
    " is no cause of that name."
)
_NAME = "name of a cause as in a report, for example rank-zero-only-work (default: list all causes)"
RULES: dict[str, tuple[Rule[Any], ...]] = {
    "Why ranks wait": HANG_RULES,
    "What recordings show": RECORDED_RULES,
    "What ranks disagree about before they train": AGREEMENT_RULES,
    "What is wrong with hosts before training": PREFLIGHT_RULES,
}
"""All rules by topic."""

_WIDEST = 100


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", type=str, default=None, help=_NAME)


def run(config: Namespace) -> int:
    """Runs ``ncclsafe explain``; returns the exit code."""
    if config.name is None:
        _print(_list(), sys.stdout)
        return 0
    wanted = config.name.strip().lower().replace("_", "-")
    found: dict[Rule[Any], list[str]] = {}
    for kind, group in RULES.items():
        for rule in group:
            if rule.name == wanted:
                found.setdefault(rule, []).append(kind)
    if not found:
        return failed(_unknown(config.name, wanted))
    _print((line for rule, kinds in found.items() for line in _explained(rule, kinds)), sys.stdout)
    return 0


def _list() -> Iterator[RenderableType]:
    for kind, group in RULES.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for rule in group:
            table.add_row(Text(f"  {rule.name}"), Text(rule.summary, "dim"))
        yield Text(kind, "bold")
        yield table
        yield Text()
    yield Text("ncclsafe explain NAME says more about one of them.")


def _explained(rule: Rule[Any], kinds: Iterable[str]) -> Iterator[RenderableType]:
    about = "; ".join(f"{kind[:1].lower()}{kind[1:]}" for kind in kinds)
    yield Text.assemble((rule.name, "bold"), (f"  {about}", "dim"))
    yield Text()
    yield Text(rule.summary)
    for title, text in rule.sections.items():
        yield Text()
        yield Text(title, "bold")
        yield Padding(text, (0, 0, 0, 2))
    yield Text()


def _unknown(given: str, wanted: str) -> str:
    names = list(dict.fromkeys(rule.name for group in RULES.values() for rule in group))
    near = [name for name in names if wanted and wanted in name]
    near = list(dict.fromkeys([*near, *get_close_matches(wanted, names)]))[:5]
    hint = f"did you mean {', '.join(near)}?" if near else "ncclsafe explain lists all causes."
    return f"there is no cause {given!r:.80}: {hint}"


def _print(lines: Iterable[RenderableType], stream: TextIO | None) -> None:
    if stream is None:
        return
    made = io.StringIO()
    console = console_for(stream, made)
    console.width = min(console.width, _WIDEST)
    for line in lines:
        console.print(line)
    say("\n".join(line.rstrip() for line in made.getvalue().splitlines()), stream)
