"""Python's tracebacks in a log, line by line, also where those of several ranks are mixed."""

import re

from lightning_ncclsafe.facts import ExceptionFacts, Frame
from lightning_ncclsafe.reading.frames import frame, stack
from lightning_ncclsafe.reading.values import whole

_MOST_FRAMES = 120
_LONGEST_MESSAGE = 2000
_MOST_LINES = 3000

_BEGINS = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<function>.{1,200}))?')
_ENDS = re.compile(r"(?P<type>[A-Za-z_][\w.]{0,120})(?::\s(?P<message>.*))?$")
_GOES_ON = re.compile(r"\s|\^|~|\.\.\.|$")

# What says only that a collective failed, that a peer or a child is gone, or that somebody has ended the process.
_CONSEQUENCE_TYPES = re.compile(
    r"(?:^|\.)(?:Dist\w*Error|ChildFailedError|ProcessExitedException|ProcessRaisedException|CalledProcessError"
    r"|SignalException|SIGTERMException|KeyboardInterrupt|SystemExit|CollectiveTimeoutError|RendezvousClosedError"
    r"|BrokenPipeError|ConnectionResetError)$"
)
_CONSEQUENCE_TEXTS = re.compile(
    r"gloo/|Gloo connect|\[c10d\]|[Cc]onnection (?:closed|reset) by|pair closure|Broken pipe|NCCL|ncclUniqueId"
    r"|monitored_?[Bb]arrier|store based barrier|Socket Timeout"
    r"|DataLoader worker .* killed by signal: (?:Terminated|Aborted)"
)


def is_consequence(type_: str, message: str) -> bool:
    """Whether an exception says only that a collective failed or that another process is gone."""
    return bool(_CONSEQUENCE_TYPES.search(type_) or _CONSEQUENCE_TEXTS.search(message))


def is_telling(exception: ExceptionFacts) -> bool:
    """Whether it says more than that somebody has ended the process: its own error, or that a peer is gone."""
    return not exception.is_consequence or _CONSEQUENCE_TEXTS.search(exception.message) is not None


def begins(text: str) -> bool:
    """Whether a traceback begins with this line."""
    return _BEGINS.search(text) is not None


class Traceback:
    """A traceback that is being read.

    Attributes:
        exception: What it says, once it has ended; None where it was none.
    """

    def __init__(self) -> None:
        self.exception: ExceptionFacts | None = None
        self._frames: list[Frame] = []
        self._lines = 0

    def goes_on(self, text: str) -> bool:
        """Reads the next line; whether the traceback goes on behind it."""
        self._lines += 1
        found = _FRAME.match(text)
        if found:
            if len(self._frames) < _MOST_FRAMES:
                self._frames.append(frame(found["file"], whole(found["line"]), (found["function"] or "").strip()))
            return True
        if _GOES_ON.match(text) and self._lines < _MOST_LINES:
            return True
        self._end(text)
        return False

    def _end(self, text: str) -> None:
        found = _ENDS.match(text)
        if found is None or not self._frames:
            return
        type_, message = found["type"], (found["message"] or "")[:_LONGEST_MESSAGE].strip()
        self.exception = ExceptionFacts(
            type=type_.rpartition(".")[2],
            message=message,
            stack=stack(self._frames),
            is_consequence=is_consequence(type_, message),
        )
