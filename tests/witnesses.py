"""Waits for the processes beside ranks that are alone on their hosts: what they import takes seconds."""

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil
from polling import until

from lightning_ncclsafe.guard import witness

STARTS_S = 60.0
"""Of a process that is nice, on a busy machine."""


def witnesses() -> Iterator[psutil.Process]:
    """Those beside this process."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.cmdline()[1:] == ["-m", witness.__name__, str(os.getpid())]:
                yield one


def attending() -> psutil.Process:
    """The one beside this process, once it attends: then it holds this process or another, to learn how it ends."""
    found = until(lambda: next(witnesses(), None), within_s=STARTS_S)
    assert found is not None
    until(lambda: "anon_inode:[pidfd]" in _open_files(found), within_s=STARTS_S)
    return found


def _open_files(process: psutil.Process) -> list[str]:
    with suppress(OSError):
        folder = f"/proc/{process.pid}/fd"
        return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    return []
