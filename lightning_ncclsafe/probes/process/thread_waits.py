"""The thread of this process that its main thread waits for, and what that thread does.

The stack shows it: ``Thread.join`` has the thread, and ``Future.result`` the future whose task another thread's stack
runs. No code of the user's is run.
"""

import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import thread as pools
from inspect import getattr_static
from itertools import takewhile
from types import FrameType
from typing import Any

from lightning_ncclsafe.facts import AwaitedThread
from lightning_ncclsafe.probes.process.stacks import (
    is_user_code,
    main_thread_frames,
    thread_stack,
    training_thread,
    with_source_in_time,
)


def _codes(*functions: Any) -> tuple[Any, ...]:
    """The code of functions; a program may have put something else in their place."""
    return tuple(function.__code__ for function in functions if hasattr(function, "__code__"))


# Code that waits for a thread to end, for one future, or for several.
_JOIN = _codes(threading.Thread.join)
_OF_ONE = _codes(futures.Future.result, futures.Future.exception)
_OF_SEVERAL = _codes(futures.wait, futures.as_completed)


def waited_for() -> AwaitedThread | None:
    """The thread that the main thread waits for; None if it waits for none, or for a task that none has begun."""
    ident = next(_awaited(), None)
    stack = thread_stack(ident) if ident not in (None, training_thread().ident) else ()
    if ident is None or not stack:
        return None
    return AwaitedThread(name=_names().get(ident, ""), stack=with_source_in_time(stack))


def _awaited() -> Iterator[int]:
    """Python's number of the thread that is awaited below the user's innermost line; none if that is unknown."""
    for frame in takewhile(lambda frame: not is_user_code(frame.f_code.co_filename), main_thread_frames()):
        if frame.f_code in _JOIN:
            ident = getattr_static(frame.f_locals.get("self"), "_ident", None)
            yield from [ident] if isinstance(ident, int) else []
        elif frame.f_code in _OF_ONE:
            yield from _running([frame.f_locals.get("self")])
        elif frame.f_code in _OF_SEVERAL and type(awaited := frame.f_locals.get("fs")) in (set, list, tuple):
            yield from _running([*awaited])


def _running(awaited: list[Any]) -> Iterator[int]:
    """The threads whose tasks complete these futures."""
    # Not when this is imported: it is private, and a Python without it lacks this fact alone.
    task = pools._WorkItem.run.__code__
    wanted = {id(future) for future in awaited if future is not None}
    for ident, innermost in sys._current_frames().items():
        if any(id(_future(frame)) in wanted for frame, _ in traceback.walk_stack(innermost) if frame.f_code is task):
            yield ident


def _future(task: FrameType) -> Any:
    return getattr_static(task.f_locals.get("self"), "future", None)


def _names() -> dict[int, str]:
    """The threads' names. The property may be the user's, so it is left alone."""
    parts = ((getattr_static(one, "_ident", None), getattr_static(one, "_name", "")) for one in threading.enumerate())
    return {ident: name for ident, name in parts if isinstance(ident, int) and isinstance(name, str)}
