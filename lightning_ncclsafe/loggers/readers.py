"""Whoever reads a logger's files in this program finds what was logged until then, as without an offload."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# What Python says before it opens a file or lists a directory, by whatever library.
_EVENTS = frozenset({"open", "os.listdir", "os.scandir"})

# What is to be done before anybody reads below a directory, by directory.
_watched: dict[str, Callable[[], None]] = {}
_is_listening = False


def watch(folder: str, before: Callable[[], None]) -> None:
    """From now on something is done before this program reads a file below a directory, or lists it.

    Args:
        folder: The directory, as an absolute path.
        before: What is done, on the thread that reads.
    """
    global _is_listening
    _watched[folder] = before
    if not _is_listening:
        _is_listening = True
        # There is no way to take it back. Without a directory to watch, it costs the calls that Python tells of a
        # fraction of a microsecond.
        sys.addaudithook(_hear)


def leave(before: Callable[[], None]) -> None:
    """Nothing is done any more; the reverse of :func:`watch`."""
    for folder in [folder for folder, other in _watched.items() if other == before]:
        del _watched[folder]


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _watched or event not in _EVENTS:
        return
    # Who only writes, a checkpoint for instance, sees nothing of what is there.
    if event == "open" and args[2] & os.O_ACCMODE == os.O_WRONLY:
        return
    # Nobody's read fails because of us; of a path that is none, it will by itself.
    with suppress(Exception):
        if not isinstance(args[0], int):
            path = os.path.abspath(os.fsdecode(args[0]))
            for folder, before in list(_watched.items()):
                if path == folder or path.startswith(f"{folder}{os.sep}"):
                    before()
