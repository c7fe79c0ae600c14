"""``ncclsafe logs``: what loggers have staged locally and their storage does not have."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jsonargparse import ArgumentParser, Namespace

from lightning_ncclsafe.cli import say
from lightning_ncclsafe.loggers.recovery import Recovered, recover
from lightning_ncclsafe.loggers.staging import (
    StagingError,
    default_staging_dir,
    is_staging,
    read_manifest,
    staging_folders,
)
from lightning_ncclsafe.report.lines import safe

HELP = "recover what loggers have staged locally but not delivered"
DESCRIPTION = f"{HELP.capitalize()}."
_RECOVER = (
    "Delivers to storage what a run has left in local staging because it was killed or its storage did not answer. You"
    " can stop it and run it again at any time. Exit code: 0 if nothing is left except what a running process still"
    " writes, 1 if something could not be recovered, 2 if DIR does not exist."
)
_DIR = "a staging folder, a folder of staging folders, or the directory (or URL) of a logger or a parent of it"
_STAGING_DIR = (
    "folder to search for the staging of a logger's directory: the staging_dir of LoggerOffload (default: %(default)s)"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the only subcommand, ``recover``, with its arguments."""
    recover = ArgumentParser(description=_RECOVER)
    parser.add_subcommands().add_subcommand("recover", recover, help="deliver it to storage")
    recover.add_argument("dir", metavar="DIR", type=str, help=_DIR)
    recover.add_argument("--staging-dir", type=str, default=str(default_staging_dir()), help=_STAGING_DIR)


def run(config: Namespace) -> int:
    """Recovers all local staging of a directory, and prints what became of each folder; returns the exit code."""
    directory, staging_dir = config.recover.dir, Path(config.recover.staging_dir)
    try:
        folders = list(_folders(directory, staging_dir))
    except OSError as error:
        _say(f"error: {error.filename} cannot be read: {error.strerror}", sys.stderr)
        return 1
    if folders:
        # All of them, even if the first fails.
        return max([_recover_one(folder) for folder in folders])
    if "://" not in directory and not os.path.isdir(directory):
        what = "is not a directory" if os.path.lexists(directory) else "does not exist"
        _say(f"error: {directory} {what}, and nothing that was logged to it is staged in {staging_dir}", sys.stderr)
        return 2
    _say(_nothing_found(directory, staging_dir), sys.stdout)
    return 0


def _folders(directory: str, staging_dir: Path) -> Iterator[Path]:
    """The folders of staging, including damaged ones."""
    if is_staging(Path(directory)):
        yield Path(directory)
        return
    inside = staging_folders(Path(directory)) if os.path.isdir(directory) else []
    yield from inside
    known = {os.path.realpath(folder) for folder in inside}
    for folder in staging_folders(staging_dir) if staging_dir.is_dir() else []:
        if os.path.realpath(folder) not in known and _is_for(directory, folder):
            yield folder


def _is_for(directory: str, folder: Path) -> bool:
    """Whether staging belongs to a logger's directory; unreadable staging may."""
    try:
        manifest = read_manifest(folder)
    except StagingError:
        return True
    is_root = _is_below(manifest.root, directory) and _is_below(directory, manifest.root)
    return is_root or _is_below(manifest.destination, directory)


def _is_below(path: str, directory: str) -> bool:
    """Whether a path is a directory, or in it; URLs as they are written."""
    if not path:
        return False
    if "://" not in path:
        path, directory = os.path.realpath(path), os.path.realpath(directory)
    return f"{path.rstrip('/')}/".startswith(f"{directory.rstrip('/')}/")


def _recover_one(folder: Path) -> int:
    try:
        done = recover(folder)
    except StagingError as error:
        _say(f"error: {error}", sys.stderr)
        return 1
    if done.is_busy:
        _say(f"{folder}: left alone: {done.problem}", sys.stdout)
        return 0
    if done.points or done.records or not done.problem:
        _say(f"{folder}: {_amount(done)}", sys.stdout)
    for problem in _problems(done):
        _say(f"error: {problem}", sys.stderr)
    return 1 if any(_problems(done)) else 0


def _amount(done: Recovered) -> str:
    """What was recovered, and where to."""
    manifest = done.manifest
    run = f" of {manifest.logger} {manifest.identity}".rstrip()
    if not done.points and not done.records:
        return f"nothing{run} was left in it"
    amounts = ((done.points, "point"), (done.records, "other record"))
    text = " and ".join(f"{number} {name}{'s' * (number != 1)}" for number, name in amounts if number)
    if done.problem:
        return f"recovered {text}{run}, and stopped"
    server = "" if manifest.kind == "files" else f"; {manifest.logger} itself was not called"
    return f"recovered {text}{run}: in {done.to}{server}"


def _problems(done: Recovered) -> Iterator[str]:
    if done.problem:
        yield f"{done.problem}; what was not delivered is still in {done.folder}"
    if done.lost_bytes:
        yield f"{done.lost_bytes} bytes of {done.folder} cannot be read and are lost: a partial write, or later damage"
    if done.lost_calls:
        lost = f"{done.lost_calls} call{'s' * (done.lost_calls != 1)}"
        yield f"{lost} of {done.manifest.logger} lost: their arguments were only in the memory of the process"


def _nothing_found(directory: str, staging_dir: Path) -> str:
    text = f"nothing to recover: {directory} neither is nor contains a staging folder, and nothing that was logged"
    text += f" to it or below it is staged in {staging_dir}"
    if not staging_dir.is_dir():
        return f"{text}, which does not exist"
    others = len(staging_folders(staging_dir))
    if others:
        text += f" ({others} folder{'s' if others != 1 else ''} of other directories)"
    return text


def _say(text: str, stream: TextIO | None) -> None:
    """Prints a line, whose text comes from files: it must not control the terminal."""
    say(safe(text), stream)
