"""What an exception says, and whether a signal's handler has raised it."""

import signal
import threading
import traceback
from pathlib import Path
from types import CodeType, FunctionType
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

    torch's raises on the main thread once a worker of a loader was killed; programs raise when an alarm goes off. Such
    an exception is not that of the code that it has interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    codes = {code for code in handlers if code is not None and not code.co_filename.startswith(_OWN)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """The code of a handler: of a function, a method, or an object that can be called."""
    if not callable(handler):
        return None
    functions = (handler, getattr(handler, "__func__", None), type(handler).__call__)
    return next((one.__code__ for one in functions if isinstance(one, FunctionType)), None)
