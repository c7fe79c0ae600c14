"""Directories that the run writes to and reads from, tried out by processes that may hang."""

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.resources import filesystem_of
from lightning_ncclsafe.probes.storage.deadline import run_all

_PROGRAM = Path(__file__).with_name("directory_trial.py")
# As fsspec and cloud tools tell them from paths; "C:\" is none.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
# Of the time that a trial has: the rest is for starting, and for an append that takes long.
_TRYING = 0.5


def try_directories(directories: Mapping[str, str], deadline_s: float = 2.0) -> tuple[DirectoryFacts, ...]:
    """Tries directories, all at the same time. It takes the deadline and 0.1 s at most, whatever they are on.

    Nothing is created but one file without a name for each, which is gone when its trial has ended.

    Args:
        directories: Paths by what they are for: ``"data"`` is read from, all others are written to.
        deadline_s: Seconds that each has.
    """
    local = {role: os.path.abspath(path) for role, path in directories.items() if not _URL.match(path)}
    commands = {role: _command(role, path, deadline_s * _TRYING) for role, path in local.items()}
    answers = run_all(commands, deadline_s)
    late = f"no answer within {deadline_s:g} s"
    return tuple(
        _facts(role, local[role], answers[role], late)
        if role in local
        else DirectoryFacts(role=role, path=path, problem="is not a local path; not tried")
        for role, path in directories.items()
    )


def _command(role: str, path: str, trying_s: float) -> list[str]:
    """Isolated: neither the user's site packages nor the working directory have a say in what is imported."""
    if not sys.executable:
        raise OSError("There is no Python interpreter to try directories with: sys.executable is empty.")
    how = "read" if role == "data" else "write"
    return [sys.executable, "-I", "-S", str(_PROGRAM), how, path, str(trying_s)]


def _facts(role: str, path: str, answer: str | None, late: str) -> DirectoryFacts:
    found: dict[str, Any] | None = None if answer is None else or_none(partial(json.loads, answer))
    # By the table of mounts: a directory that hangs is not touched here.
    folder = str(found.pop("folder", path)) if found else path
    filesystem = or_none(partial(filesystem_of, folder)) or ""
    if found:
        return DirectoryFacts(role=role, path=path, filesystem=filesystem, **found)
    problem = late if answer is None else "the trial ended without an answer"
    return DirectoryFacts(role=role, path=path, filesystem=filesystem, problem=problem)
