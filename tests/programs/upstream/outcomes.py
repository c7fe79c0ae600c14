"""What came of a test, and the file in which that is noted while tests run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END = ""
"""Stands in the place of a test once all have been run."""


@dataclass(frozen=True)
class Outcome:
    """What came of one test.

    Attributes:
        kind: ``passed``, ``failed``, ``skipped``, ``xfailed``, or ``ended``: it has taken its process with it.
        why: Of a test that did not pass, the reason in one line.
        used_ours: Whether it has made a strategy of ours, or had a logger offloaded.
    """

    kind: str
    why: str = ""
    used_ours: bool = False
    took_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.kind in ("passed", "xfailed")


def noted(notes: Path) -> list[dict[str, Any]]:
    """The lines of a file of notes: one where a test begins, one where it has ended; the last may have been cut off."""
    found = []
    for line in notes.read_text().splitlines() if notes.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def outcomes(notes: Path) -> dict[str, Outcome]:
    """What came of each test that was begun."""
    told: dict[str, Outcome] = {}
    for line in noted(notes):
        if "outcome" in line and line["id"] != END:
            told[line["id"]] = Outcome(line["outcome"], line["why"], line["used_ours"], line["took_s"])
        elif line["id"] != END:
            told[line["id"]] = Outcome("ended", "it has ended its process, or was stuck")
    return told
