"""What is really wrong with a training that is made to go wrong, and the list of all such trainings.

A scenario is a function that every rank calls. Its decorator says the truth about it: `fault` or `healthy`. The line
that is to blame is marked in its source, so that the truth cannot drift from it.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from whose_fault import OF_CODE, OF_DATA, OF_MACHINE

Run = Callable[[Any], None]
HERE = "# <- here"
"""Marks the line that is to blame, in the function; a line outside of it is marked with the function's name."""


class Moment(str, Enum):
    """When a training goes wrong."""

    START = "start"
    """Before the first batch."""
    FIRST_STEP = "first-step"
    MIDDLE = "middle"
    EPOCH_END = "epoch-end"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    END = "end"
    """After the last batch."""


PHASES = {
    Moment.START: "init",
    Moment.FIRST_STEP: "train",
    Moment.MIDDLE: "train",
    Moment.EPOCH_END: "train",
    Moment.VALIDATION: "validate",
    Moment.CHECKPOINT: "checkpoint",
    Moment.END: "train",
}
"""The phase that the ranks at fault are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training that is a program of its own, in a folder.

    Attributes:
        folder: With its files; one line of them may be marked with `HERE`.
        argv: What is run: a file of the folder, and its arguments.
        launcher: What starts its ranks: ``"torchrun"``, or ``"lightning"``.
    """

    folder: Path
    argv: tuple[str, ...]
    launcher: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A small training, and the truth about it.

    Attributes:
        name: Of the function.
        run: What every rank does.
        causes: Names of the cause; several where more than one of them is true. None for a healthy training.
        ranks: The ranks that cause it, negative ones counted from the last; `odd_one_out`, or None for all of them.
        at: How many ranks there are, by the moment at which it happens.
        has_line: Whether a line of the scenario is to blame.
        has_ranks: Whether some ranks cause it, and not others.
        has_phase: Whether the phase of the ranks at fault is that of the moment.
        phase: The phase that they are in, where it is not that of the moment.
        needs: What it takes, and not every machine permits: ``"namespaces"``; empty for nothing.
        whose: Whose fault it is, where the causes do not tell: ``"code"`` (settings and data are of it), ``"machine"``,
            or ``"either"``.
        strategies: Names of those that it is for.
        is_cold: Whether its ranks are programs of their own, and no forks of one that has imported everything.
        real_time: Whether a healthy one is judged with the thresholds that users have.
        program: What is run instead of ``run``, as users run it; None for nearly all.
        source: Address of the public thread that it was written after, without sight of a rule, and with the truth
            written down before its first run; empty for the others.
    """

    name: str
    run: Run
    causes: tuple[str, ...] = ()
    ranks: tuple[int, ...] | Callable[[int], tuple[int, ...]] | None = ()
    at: Mapping[Moment, tuple[int, ...]]
    has_line: bool = True
    has_ranks: bool = True
    has_phase: bool = True
    phase: str = ""
    needs: str = ""
    whose: str = ""
    strategies: tuple[str, ...] = ("SafeDDP",)
    is_cold: bool = False
    real_time: bool = False
    program: Program | None = None
    source: str = ""

    @property
    def fault_of(self) -> str:
        """``"code"``, ``"machine"``, or ``"either"``."""
        sides = {"code": OF_CODE | OF_DATA, "machine": OF_MACHINE}
        return self.whose or next((side for side, of in sides.items() if {*self.causes} <= of), "either")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario with so many ranks at one moment.

    Attributes:
        scenario: The scenario.
        world_size: Number of ranks.
        moment: When it happens.
    """

    scenario: Scenario
    world_size: int
    moment: Moment

    @property
    def name(self) -> str:
        """``"evaluation_on_rank_zero-epoch-end-3"``."""
        return f"{self.scenario.name}-{self.moment.value}-{self.world_size}"

    @property
    def is_healthy(self) -> bool:
        return not self.scenario.causes

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that cause it."""
        found = range(self.world_size) if self.scenario.ranks is None else self.scenario.ranks
        found = found(self.world_size) if callable(found) else found
        return tuple(sorted(rank % self.world_size for rank in found))

    @property
    def phase(self) -> str:
        """The phase in which they do; empty where that is not said."""
        return (self.scenario.phase or PHASES[self.moment]) if self.scenario.has_phase else ""

    @property
    def place(self) -> str:
        """The marked line as findings name it: ``"FILE:LINE "``; empty where none is to blame."""
        return place_of(self.scenario) if self.scenario.has_line else ""

    def is_marked(self, location: str) -> bool:
        """Whether a location of a finding is the marked line, or another line of the same statement or head of one."""
        file, _, line = self.place.strip().rpartition(":")
        return any(location.startswith(f"{file}:{number} ") for number in statement_lines(file, int(line)))


@cache
def statement_lines(file: str, line: int) -> range:
    """The lines of the statement that a line belongs to; of one that contains others, those of its head."""
    statements = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.stmt))
    within = ((node, getattr(node, "body", None)) for node in statements)
    ranges = (range(node.lineno, body[0].lineno if body else (node.end_lineno or 0) + 1) for node, body in within)
    return next((lines for lines in ranges if line in lines), range(line, line + 1))


def place_of(scenario: Scenario) -> str:
    """``"FILE:LINE "`` of the marked line.

    Raises:
        LookupError: There is none, or more than one.
    """
    if scenario.program is not None:
        return _place_in(scenario.program)
    lines, first = inspect.getsourcelines(scenario.run)
    file = Path(inspect.getsourcefile(scenario.run) or "")
    found = [first + index for index, line in enumerate(lines) if line.rstrip().endswith(HERE)]
    if not found:
        mark = f"# <- {scenario.name}"
        found = [number for number, line in enumerate(file.read_text().splitlines(), 1) if line.endswith(mark)]
    if len(found) != 1:
        raise LookupError(f"{scenario.name} has {len(found)} marked lines in {file.name}, not one")
    return f"{file}:{found[0]} "


def marks_of(program: Program) -> list[tuple[Path, int]]:
    """The marked lines of a program, each with its file."""
    files = ((file, file.read_text().splitlines()) for file in sorted(program.folder.rglob("*.py")))
    return [(file, number) for file, lines in files for number, line in enumerate(lines, 1) if line.endswith(HERE)]


def _place_in(program: Program) -> str:
    marks = marks_of(program)
    if len(marks) != 1:
        raise LookupError(f"{program.folder.name} has {len(marks)} marked lines, not one")
    return "{}:{} ".format(*marks[0])


def odd_one_out(world_size: int) -> tuple[int, ...]:
    """The last rank, where it is not as all others are; of two, neither is the odd one."""
    return (-1,) if world_size > 2 else (0, 1)


SCENARIOS: dict[str, Scenario] = {}
"""All that have been imported, by name."""


def fault(
    *causes: str,
    ranks: tuple[int, ...] | Callable[[int], tuple[int, ...]] | None,
    at: Mapping[Moment, tuple[int, ...]],
    **more: Any,
) -> Callable[[Run], Run]:
    """The truth about a training that goes wrong; see `Scenario`."""

    def add(run: Run) -> Run:
        return _add(run, causes=causes, ranks=ranks, at=at, **more)

    return add


def healthy(at: Mapping[Moment, tuple[int, ...]], **more: Any) -> Callable[[Run], Run]:
    """Of a training of which nothing is to be said, however slow it is; see `Scenario`."""

    def add(run: Run) -> Run:
        return _add(run, at=at, has_line=False, has_phase=False, **more)

    return add


def _add(run: Run, **truth: Any) -> Run:
    name = run.__name__
    if name in SCENARIOS and SCENARIOS[name].run.__module__ != run.__module__:
        raise ValueError(f"two scenarios are called {name}")
    SCENARIOS[name] = Scenario(name=name, run=run, **truth)
    return run


def cases_of(scenario: Scenario) -> Iterator[Case]:
    """A scenario at each of its moments, with each number of ranks."""
    for moment, sizes in scenario.at.items():
        for world_size in sizes:
            yield Case(scenario=scenario, world_size=world_size, moment=moment)


def all_cases() -> dict[str, Case]:
    """Of all scenarios that have been imported, by name."""
    return {case.name: case for scenario in SCENARIOS.values() for case in cases_of(scenario)}
