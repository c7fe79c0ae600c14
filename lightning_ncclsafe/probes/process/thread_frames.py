"""What all threads of this process are in, asked for so that nothing can hang on it.

Before Python 3.12, both functions of ``sys`` create objects (frames, since 3.11) while they hold a lock of the
interpreter, and so may start a garbage collection there, which runs Python code: finalizers, and ``gc.callbacks``. If
another thread gets its turn meanwhile and starts a thread, both wait forever (python/cpython#106883); if it forks, the
child does (python/cpython#112275): with 3.11.7, 4 of 931 children hung beside a thread that asks all the time. Later
releases of 3.11 are corrected.
"""

import gc
import sys
import threading
from collections.abc import Callable
from operator import methodcaller
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_MAY_COLLECT = sys.version_info < (3, 12)
_CALL = methodcaller("__call__")


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by its ident; for this thread, that of the caller."""
    frames = _without_collecting(sys._current_frames)
    frames[threading.get_ident()] = sys._getframe(1)
    return frames


def current_exceptions() -> dict[int, Any]:
    """The exception that each thread handles, by its ident; before Python 3.12 as a tuple, as of ``sys.exc_info``."""
    return _without_collecting(sys._current_exceptions)


def _without_collecting(read: Callable[[], T]) -> T:
    if not _MAY_COLLECT or not gc.isenabled():
        return read()
    try:
        # In one call of C code: no other thread gets its turn, and forks or asks, while nothing is collected.
        _, result, _ = map(_CALL, (gc.disable, read, gc.enable))
    except BaseException:
        gc.enable()
        raise
    return result  # type: ignore[no-any-return]
