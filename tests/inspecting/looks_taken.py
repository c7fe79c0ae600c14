"""Looks at real jobs, kept: as JSON, with the sources that their lines are in, and without this machine's paths."""

import json
import linecache
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ncclsafe.facts.codec import from_plain, to_plain
from lightning_ncclsafe.inspecting.inspection import SeenRank

TAKEN = Path(__file__).with_name("taken")
# What a path begins with on the machine of a recording, and what is written instead.
SITE, PROJECT = "/venv/lib/python3.11/site-packages", "/home/ada/project"


def load(name: str) -> list[SeenRank]:
    """The ranks of a recording; the lines of their sources can be read from now on."""
    plain = json.loads((TAKEN / f"{name}.json").read_text())
    for file, text in plain["sources"].items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return [from_plain(SeenRank, one) for one in plain["ranks"]]


def save(name: str, ranks: Iterable[SeenRank], folders: dict[str, str]) -> None:
    """Writes a recording.

    Args:
        name: Of the file.
        ranks: What was seen.
        folders: What paths begin with here, and what is written instead.
    """
    seen = [*ranks]
    users = {
        frame.file
        for one in seen
        for look in one.looks
        for frame in look.stack
        if Path(frame.file).exists() and not any(part in frame.file for part in ("-packages/", "/lib/python"))
    }
    sources = {file: Path(file).read_text() for file in sorted(users)}
    # Nothing but what is read of it is to be known of the machine.
    kept = [replace(one, process=replace(one.process, environment={})) for one in seen]
    plain: dict[str, Any] = {"sources": sources, "ranks": [to_plain(one) for one in kept]}
    text = json.dumps(plain, indent=1)
    for here, there in folders.items():
        text = text.replace(here, there)
    TAKEN.mkdir(exist_ok=True)
    (TAKEN / f"{name}.json").write_text(text + "\n")
