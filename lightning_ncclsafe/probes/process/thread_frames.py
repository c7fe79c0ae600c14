"""What all threads of this process are in, asked for so that nothing can hang on it.

In Python 3.11, both functions create frame objects while they hold a lock of the interpreter, and so may start a
garbage collection there, which runs Python code: finalizers, and ``gc.callbacks``. If another thread gets its turn
meanwhile and starts a thread, both wait forever (python/cpython#106883); if it forks, the child does
(python/cpython#112275): with 3.11.7 in 4 of 931 forks beside a thread that asks all the time. Later releases of 3.11
are corrected, and since Python 3.12, garbage is collected after such a call.
"""

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_MAY_COLLECT = sys.version_info < (3, 12)


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by its ident, see ``sys._current_frames``; of this thread, the caller's."""
    frames = _without_collecting(sys._current_frames)
    frames[threading.get_ident()] = sys._getframe(1)
    return frames


def current_exceptions() -> dict[int, Any]:
    """The exception that each thread handles, by its ident; before Python 3.12 as a tuple, as of ``sys.exc_info``."""
    return _without_collecting(sys._current_exceptions)


def _without_collecting(read: Callable[[], T]) -> T:
    if not _MAY_COLLECT or not gc.isenabled():
        return read()
    gc.disable()
    try:
        return read()
    finally:
        gc.enable()
