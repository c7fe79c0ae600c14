"""Commands in processes of their own, all at once, each given up when its time is over: what may hang cannot hang us.

A system call on a dead mount returns to nobody, and a thread that has made one can be ended by nothing. Such a process
is killed, and left to the kernel where even that does not reach it.
"""

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

_MOST_BYTES = 1 << 16
# A process that is killed goes at once, unless it waits in the kernel for a device.
_GOES_WITHIN_S = 0.1


def run_all(commands: Mapping[K, Sequence[str]], deadline_s: float) -> dict[K, str | None]:
    """Runs commands at the same time, each in a session of its own, without input and without what it says of errors.

    New programs are started and nothing is forked, so that it may be called where CUDA is in use and threads run.

    Args:
        commands: Program and arguments, by a name of the caller's.
        deadline_s: Seconds that each has; what has not ended then is killed, with what it has started.

    Returns:
        What each has written, 64 KiB at most; None for one that was not done in time.

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
    # The working directory may be on the mount that is dead.
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
    """What they write until they close their output, which is when they end."""
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
        # Its process id is still its own: it has not been waited for.
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    ends_s = time.monotonic() + _GOES_WITHIN_S
    for process in processes:
        try:
            process.wait(max(ends_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            # In uninterruptible sleep; should the mount come back, it ends, and is then reaped.
            threading.Thread(target=process.wait, name="ncclsafe-reap", daemon=True).start()
