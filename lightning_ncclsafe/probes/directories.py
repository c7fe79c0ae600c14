"""Directories that the run writes to and reads from, tried by processes that are killed if they hang.

A system call on a dead mount never returns, and nothing can end the thread that made it. A process can be killed, or is
left to the kernel if even that has no effect.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_ncclsafe.facts import DirectoryFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.resources import filesystem_of

_PROGRAM = Path(__file__).with_name("directory_trial.py")
# As fsspec and cloud tools distinguish URLs from paths; "C:\" is not one.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
# The share of a trial's time for trying; the rest is for starting, and for an append that takes long.
_TRYING = 0.5

K = TypeVar("K", bound=Hashable)

_MOST_BYTES = 1 << 16
# A killed process ends at once, unless it waits in the kernel for a device.
_GOES_WITHIN_S = 0.1


def try_directories(directories: Mapping[str, str], deadline_s: float = 2.0) -> tuple[DirectoryFacts, ...]:
    """Tries directories, all at the same time. It takes at most the deadline and 0.1 s, whatever their storage.

    Each trial creates only one unlinked file, which disappears with the trial.

    Args:
        directories: Paths by purpose: ``"data"`` is read from, all others are written to.
        deadline_s: Seconds for each trial.
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
    """The command of a trial, isolated: it imports nothing from the user's site packages or the working directory."""
    if not sys.executable:
        raise OSError("There is no Python interpreter to try directories with: sys.executable is empty.")
    how = "read" if role == "data" else "write"
    return [sys.executable, "-I", "-S", str(_PROGRAM), how, path, str(trying_s)]


def _facts(role: str, path: str, answer: str | None, late: str) -> DirectoryFacts:
    found: dict[str, Any] | None = None if answer is None else or_none(partial(json.loads, answer))
    # From the table of mounts: a directory that hangs is not accessed here.
    folder = str(found.pop("folder", path)) if found else path
    filesystem = or_none(partial(filesystem_of, folder)) or ""
    if found:
        return DirectoryFacts(role=role, path=path, filesystem=filesystem, **found)
    problem = late if answer is None else "the trial exited without an answer"
    return DirectoryFacts(role=role, path=path, filesystem=filesystem, problem=problem)


def run_all(commands: Mapping[K, Sequence[str]], deadline_s: float) -> dict[K, str | None]:
    """Runs commands at the same time, each in its own session, without input, and without its stderr.

    It starts new programs and does not fork, so it is safe when CUDA is in use and threads run.

    Args:
        commands: Program and arguments, by a name.
        deadline_s: Seconds for each command; after that, it is killed with all that it has started.

    Returns:
        The output of each, at most 64 KiB; None for one that did not end in time.

    Raises:
        OSError: If a program cannot be started.
    """
    ends_s = time.monotonic() + deadline_s
    running: dict[K, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            running[name] = _start(command)
        return _outputs(running, ends_s)
    finally:
        _end(list(running.values()))


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    # The working directory may be on a dead mount.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        start_new_session=True,
    )


def _outputs(running: "Mapping[K, subprocess.Popen[bytes]]", ends_s: float) -> dict[K, str | None]:
    """The outputs of processes, read until they end."""
    written: dict[K, bytes] = dict.fromkeys(running, b"")
    late = set(running)
    with selectors.DefaultSelector() as selector:
        for name, process in running.items():
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, name)
        while late and (left_s := ends_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                data = os.read(key.fd, _MOST_BYTES)
                written[key.data] += data
                if not data or len(written[key.data]) > _MOST_BYTES:
                    selector.unregister(key.fileobj)
                    late.discard(key.data)
    return {
        name: None if name in late else text[:_MOST_BYTES].decode(errors="replace") for name, text in written.items()
    }


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.stdout is not None:
            process.stdout.close()
        # The process id cannot be reused yet, as the process has not been waited for.
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    ends_s = time.monotonic() + _GOES_WITHIN_S
    for process in processes:
        try:
            process.wait(max(ends_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            # In uninterruptible sleep: it ends, and is reaped, if the mount comes back.
            threading.Thread(target=process.wait, name="ncclsafe-reap", daemon=True).start()
