"""Where ``faulthandler`` writes a crash of this process: to the rank's file, or in a fork to one of its parent's.

A user who has called ``faulthandler.enable`` gets the crashes, and nothing here takes them back.
"""

import faulthandler
import os
import weakref
from typing import IO


class _CrashFile:
    """The file for fatal signals. Only ``faulthandler`` refers to it, so it exists for as long as that writes to it."""

    def __init__(self, file: IO[bytes], *, is_parents: bool) -> None:
        self.file = file
        self.is_parents = is_parents

    def fileno(self) -> int:
        return self.file.fileno()


_held: "weakref.ref[_CrashFile] | None" = None


def _current() -> _CrashFile | None:
    """None if the user has called ``faulthandler.enable`` or ``disable`` since."""
    return _held() if _held is not None else None


def _enable(file: IO[bytes], *, is_parents: bool) -> None:
    global _held
    crash_file = _CrashFile(file, is_parents=is_parents)
    faulthandler.enable(file=crash_file, all_threads=True)
    _held = weakref.ref(crash_file)


def take_crashes(file: IO[bytes]) -> None:
    """A crash of this rank is written to this file, unless the user has sent crashes elsewhere."""
    if not faulthandler.is_enabled() or _writes_for_parent():
        _enable(file, is_parents=False)


def leave_crashes(file: IO[bytes]) -> None:
    """Reverses :func:`take_crashes`."""
    current = _current()
    if current is not None and current.file is file:
        faulthandler.disable()


def writes_crashes() -> bool:
    """Whether a crash of this process is written to its own file."""
    current = _current()
    return current is not None and not current.is_parents


def write_crashes_to(file: int) -> None:
    """In a forked child: a crash is written to a file of its parent's, until this process arms its own.

    Args:
        file: Its descriptor, which stays open.
    """
    if not faulthandler.is_enabled():
        _enable(os.fdopen(file, "wb", buffering=0, closefd=False), is_parents=True)


def cease_crashes() -> None:
    """Reverses :func:`write_crashes_to`, unless the user has called ``faulthandler.enable`` since."""
    if _writes_for_parent():
        faulthandler.disable()


def _writes_for_parent() -> bool:
    current = _current()
    return current is not None and current.is_parents


def _forget_crashes() -> None:
    """In a fork: its crash would be taken for one of its parent."""
    if _current() is not None:
        faulthandler.disable()


os.register_at_fork(after_in_child=_forget_crashes)
