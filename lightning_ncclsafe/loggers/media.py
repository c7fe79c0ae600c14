"""A process that encodes media: an image of 512 x 512 takes 0.1 s, mostly with the GIL held."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, BinaryIO

# Smaller arguments are encoded faster than they are sent.
LARGE_BYTES = 1 << 16
# What the process sends once it has imported everything.
_READY = b"ready"


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
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            _send(process.stdin, request)
            self._wait_until_ready(process)
            made: list[tuple[str, bytes]] | Exception | None = pickle.loads(_receive(process.stdout))
        except (OSError, EOFError, ValueError) as error:  # The last, if another thread has closed a pipe.
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
            process, self._process, self._is_ready = self._process, None, False
        if process is None:
            return
        # It has no state. First, so that the thread that waits for an answer releases the pipe.
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _running(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_refusing:
                raise MediaProcessError("it takes no more calls")
            if self._process is None:
                # On one core, without the job's GPUs, and without user scripts that shadow our modules.
                environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, **environment},
                )
                assert self._process.stdin is not None
                _send(self._process.stdin, pickle.dumps(self._begins))
            return self._process

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        if self._is_ready:
            return
        assert process.stdout is not None
        _exactly(process.stdout, len(_READY))
        with self._lock:
            self._is_ready = process is self._process


def _send(pipe: BinaryIO | Any, data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> bytes:
    length = int.from_bytes(_exactly(pipe, 8), "little")
    return _exactly(pipe, length)


def _exactly(pipe: BinaryIO | Any, length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError("the other side is gone")
    return bytes(data)


def _serve() -> None:
    """Runs in the process: answers requests until the pipe is closed."""
    # Ctrl-C and a scheduler's SIGTERM reach it, too, but what was accepted before still has to be written.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(10)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What a library prints must not mix with answers.
    os.dup2(2, 1)
    from lightning_ncclsafe.loggers.events import EventMaker

    logdir, settings = pickle.loads(_receive(requests))
    maker = EventMaker(logdir, **settings)
    answers.write(_READY)
    answers.flush()
    while True:
        request = _receive(requests)
        made: list[tuple[str, bytes]] | Exception | None = None
        try:
            # Fails for a class that only the user's own program has.
            name, args, kwargs, created = pickle.loads(request)
        except Exception:
            _send(answers, pickle.dumps(made))
            continue
        try:
            made = maker.make(name, args, kwargs, created)
        except Exception as error:
            made = type(error)(*error.args) if type(error).__module__ == "builtins" else RuntimeError(repr(error))
        _send(answers, pickle.dumps(made))


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError):
        _serve()
