"""Delivers what was logged before this program reads a logger's files, so that it finds all of it there."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

# Audit events of Python before it opens a file or lists a directory, for whatever library.
_EVENTS = frozenset({"open", "os.listdir", "os.scandir"})


class _Watch(NamedTuple):
    folder: str
    names: tuple[str, ...]
    before: Callable[[], None]


_watched: tuple[_Watch, ...] = ()
_is_listening = False


def watch(folder: str, names: tuple[str, ...], before: Callable[[], None]) -> None:
    """Calls a function before this program reads a file below a directory, or lists it.

    Args:
        folder: The directory, as an absolute path.
        names: Parts of the names of the files.
        before: The function; called on the thread that reads.
    """
    global _is_listening, _watched
    _watched = (*_watched, _Watch(folder, names, before))
    if not _is_listening:
        _is_listening = True
        # A hook cannot be removed, but does nothing if nothing is watched. Each audit event, a call of id for instance,
        # takes about 0.2 microseconds longer.
        sys.addaudithook(_hear)


def leave(before: Callable[[], None]) -> None:
    """Reverses :func:`watch`."""
    global _watched
    _watched = tuple(one for one in _watched if one.before != before)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _watched or event not in _EVENTS:
        return
    # Writing alone shows nothing of the content.
    if event == "open" and args[2] & os.O_ACCMODE == os.O_WRONLY:
        return
    # No read fails because of this; one of an invalid path fails by itself.
    with suppress(Exception):
        if not isinstance(args[0], int):
            path = os.path.abspath(os.fsdecode(args[0]))
            for one in _watched:
                is_below = path == one.folder or path.startswith(f"{one.folder}{os.sep}")
                # Data or a checkpoint may be there, too.
                if is_below and (event != "open" or any(name in os.path.basename(path) for name in one.names)):
                    one.before()
