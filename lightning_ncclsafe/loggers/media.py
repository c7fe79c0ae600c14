"""A process that encodes media: an image of 512 x 512 takes 0.1 s, mostly with the GIL held."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

# Smaller arguments are encoded faster than they are sent.
LARGE_BYTES = 1 << 16


class MediaProcessError(Exception):
    """The process is not available, or cannot be sent this: the call has to be made here."""


class MediaProcess:
    """Encodes the large calls of one thread in a process of low priority, which the first of them starts.

    It imports torch first, which on a busy host may take it minutes.

    Args:
        settings: See :class:`~lightning_ncclsafe.loggers.events.EventMaker`.
    """

    def __init__(self, logdir: str, settings: dict[str, Any]) -> None:
        self._begins = (logdir, settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._is_ready = self._is_refusing = False
        self._lock = threading.Lock()

    def make(self, name: str, args: Any, kwargs: Any, created: float) -> list[tuple[str, bytes]]:
        """The events of one call; see :meth:`~lightning_ncclsafe.loggers.events.EventMaker.make`.

        Raises:
            MediaProcessError: If the process has died, or the arguments cannot be sent.
            Exception: What the call raises.
        """
        # Pickle is safe here, as both ends of the pipe are ours. What cannot be pickled fails before anything is sent.
        try:
            request = pickle.dumps((name, args, kwargs, created), protocol=5)
        except Exception as error:
            raise MediaProcessError(f"{name} cannot be sent: {error!r}") from error
        try:
            pipe = self._running()
            pipe.send_bytes(request)
            self._wait_until_ready(pipe)
            made: list[tuple[str, bytes]] | Exception | None = pickle.loads(pipe.recv_bytes())
        except (OSError, EOFError) as error:
            self.close()
            raise MediaProcessError(f"the process that encodes media has exited: {error!r}") from error
        if made is None:
            raise MediaProcessError(f"{name} cannot be read by another process")
        if isinstance(made, Exception):
            raise made
        return made

    def refuse(self) -> None:
        """Takes no more calls, because the end of the run now waits for them.

        The call that the process is making is still made, but not one that waits until it has started.
        """
        with self._lock:
            self._is_refusing, is_starting = True, not self._is_ready
        if is_starting:
            self.close()

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            # A thread that waits for an answer still has the pipe, which is closed once nobody has it.
            process, self._process, self._pipe, self._is_ready = self._process, None, None, False
        if process is not None:
            # It has no state.
            process.kill()
            process.wait()

    def _running(self) -> Connection:
        with self._lock:
            if self._is_refusing:
                raise MediaProcessError("it takes no more calls")
            if self._pipe is None:
                pipe, theirs = multiprocessing.Pipe()
                # On one core, without the job's GPUs, and without user scripts that shadow our modules. What a library
                # prints goes to standard error.
                environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
                # Its end of the pipe is its standard input. Under its own number it could replace a standard stream, if
                # this program has closed one.
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", __name__],
                        stdin=theirs.fileno(),
                        stdout=2,
                        env={**os.environ, **environment},
                    )
                self._pipe = pipe
                pipe.send_bytes(pickle.dumps(self._begins))
            return self._pipe

    def _wait_until_ready(self, pipe: Connection) -> None:
        if self._is_ready:
            return
        pipe.recv_bytes()
        with self._lock:
            self._is_ready = pipe is self._pipe


def _serve(pipe: Connection) -> None:
    """Runs in the process: answers requests until the pipe is closed."""
    # Ctrl-C and a scheduler's SIGTERM reach it, too, but what was accepted before still has to be written.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(10)
    from lightning_ncclsafe.loggers.events import EventMaker

    logdir, settings = pickle.loads(pipe.recv_bytes())
    maker = EventMaker(logdir, **settings)
    # Everything is imported.
    pipe.send_bytes(b"")
    while True:
        try:
            request = pipe.recv_bytes()
        except OSError:  # the program was killed while it sent this
            return
        made: list[tuple[str, bytes]] | Exception | None = None
        try:
            # Fails for a class that only the user's own program has.
            name, args, kwargs, created = pickle.loads(request)
        except Exception:
            pipe.send_bytes(pickle.dumps(made))
            continue
        try:
            made = maker.make(name, args, kwargs, created)
        except Exception as error:
            made = type(error)(*error.args) if type(error).__module__ == "builtins" else RuntimeError(repr(error))
        pipe.send_bytes(pickle.dumps(made))


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):
        _serve(Connection(0))
