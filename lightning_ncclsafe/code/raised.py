"""What an exception says, and whether a signal's handler has raised it."""

import itertools
import signal
import threading
import traceback
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

_OWN = str(Path(__file__).parents[1])


def text_of(error: BaseException) -> str:
    """The text of an exception; one whose own code for that fails has the text that Python's tracebacks give it."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether the handler of a signal has raised it, which Python runs between any two instructions of the main thread.

    torch's handler raises once a loader worker has been killed, and programs raise when an alarm goes off. Such an
    exception is not a failure of the code that it has interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    codes = {code for code in handlers if code is not None and not code.co_filename.startswith(_OWN)}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        frame.f_code in codes and _is_given(frame, interrupted) for interrupted, frame in itertools.pairwise(frames)
    )


def _is_given(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a function was called with the frame above its own, as Python calls handlers, and only them.

    The code of a decorator is that of everything it decorates: a handler, and what loggers do on rank zero.
    """
    values = [*frame.f_locals.values()]
    values += (item for value in values if type(value) is tuple for item in value)  # of ``*args``
    return any(value is interrupted for value in values)


def _code_of(handler: Any) -> CodeType | None:
    """The code of a handler: of a function, a method, or an object that can be called."""
    if not callable(handler):
        return None
    function = handler.__func__ if isinstance(handler, MethodType) else handler
    functions = (function, type(handler).__call__)
    return next((one.__code__ for one in functions if isinstance(one, FunctionType)), None)
