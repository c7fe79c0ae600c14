"""Trainings that are whole programs, after public threads, as users write and start them: ``--whole-programs``.

``whole_programs/NAME/`` holds a program, which has the strategy with all its defaults, and ``truth.json``:

    {
      "source": "https://...",            the public thread
      "says": "Rank 0 alone evaluates.",  what is wrong, or only looks odd
      "causes": ["rank-zero-only-work"],  none for a healthy training
      "ranks": [0],                       null where it cannot be said of some that they cause it
      "world_size": 3,
      "launcher": "torchrun",             or "lightning", which starts the other ranks from rank 0
      "program": ["train.py"]             a file of the folder and its arguments
    }
"""

import json
from pathlib import Path
from typing import Any

from truths import Case, Moment, Program, Scenario, marks_of

FOLDER = Path(__file__).with_name("whole_programs")


def whole_programs() -> list[Case]:
    """One of each folder."""
    return [_case(path.parent) for path in sorted(FOLDER.glob("*/truth.json"))]


def _case(folder: Path) -> Case:
    truth = json.loads((folder / "truth.json").read_text())
    argv = (str(folder / word) if (folder / word).is_file() else word for word in truth["program"])
    program = Program(folder=folder, argv=tuple(argv), launcher=truth["launcher"])
    scenario = Scenario(
        name=folder.name,
        run=_not_called,
        causes=tuple(truth["causes"]),
        ranks=tuple(truth["ranks"] or ()),
        has_ranks=truth["ranks"] is not None,
        at={Moment.MIDDLE: (truth["world_size"],)},
        has_line=bool(marks_of(program)),
        has_phase=False,
        is_cold=True,
        real_time=True,
        program=program,
        source=truth["source"],
    )
    return Case(scenario=scenario, world_size=truth["world_size"], moment=Moment.MIDDLE)


def _not_called(_: Any) -> None:
    raise NotImplementedError("a program is run, not called")
