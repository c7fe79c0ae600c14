"""The thread of this process that its main thread waits for, or that holds a lock which it waits for.

The stack shows it: ``Thread.join`` has the thread, and ``Future.result`` the future whose task another thread's stack
runs. Python does not record which thread holds a lock, so the source shows it: a thread in the block of a ``with``
statement holds the lock that the statement's expression names. None of the user's code is run.
"""

import ast
import linecache
import re
import threading
import traceback
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import thread as pools
from functools import lru_cache
from inspect import getattr_static
from itertools import takewhile
from types import FrameType
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import AwaitedThread, Frame, ThreadLockFacts
from lightning_ncclsafe.probes.process.stacks import (
    is_user_code,
    main_thread_frames,
    place_in,
    thread_stack,
    training_thread,
    with_source_in_time,
)
from lightning_ncclsafe.probes.process.thread_frames import current_frames
from lightning_ncclsafe.probes.source.syntax import last_line, syntax_tree

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_TAKES = ("acquire", "__enter__")
# Checked on a line before the whole file is parsed.
_TAKES_ONE = re.compile(r"\bwith\b|\.acquire\(|\.__enter__\(")
_OWNER = re.compile(r" owner=(\d+) ")


def _codes(*functions: Any) -> tuple[Any, ...]:
    """The code of functions; a program may have put something else in their place."""
    return tuple(function.__code__ for function in functions if hasattr(function, "__code__"))


# Code that waits for a thread to end, for one future, or for several.
_JOIN = _codes(threading.Thread.join)
_OF_ONE = _codes(futures.Future.result, futures.Future.exception)
_OF_SEVERAL = _codes(futures.wait, futures.as_completed)


def awaited_thread() -> AwaitedThread | None:
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
    for ident, innermost in current_frames().items():
        if any(id(_future(frame)) in wanted for frame, _ in traceback.walk_stack(innermost) if frame.f_code is task):
            yield ident


def _future(task: FrameType) -> Any:
    return getattr_static(task.f_locals.get("self"), "future", None)


def _names() -> dict[int, str]:
    """The threads' names. The property may be the user's, so it is left alone."""
    parts = ((getattr_static(one, "_ident", None), getattr_static(one, "_name", "")) for one in threading.enumerate())
    return {ident: name for ident, name in parts if isinstance(ident, int) and isinstance(name, str)}


class _LockUse(NamedTuple):
    """A place in a source file at which a lock is acquired.

    Attributes:
        lock: The expression that names it.
        first: The first line of the expression or call that acquires it.
        last: The last line of that expression or call.
        end: The last line of the block in which it is held; 0 without one.
    """

    lock: ast.expr
    first: int
    last: int
    end: int = 0


def awaited_thread_lock() -> ThreadLockFacts | None:
    """The lock that the main thread waits for; None if it waits for none, or nothing shows which thread holds it."""
    frame = next(main_thread_frames(), None)
    file, line, _ = place_in(frame, frame.f_lineno) if frame is not None else ("", 0, "")
    if frame is None or not _TAKES_ONE.search(linecache.getline(file, line)):
        return None
    uses = (use for use in _uses(file) if use.first <= line <= use.last)
    found = ((use, lock) for use in uses if (lock := _named(use.lock, frame)) is not None and _is_held(lock))
    use, lock = next(found, (None, None))
    if use is None:
        return None
    ident, place = _holder(lock)
    if ident is None:
        return None
    return ThreadLockFacts(
        lock=_text(use, frame),
        thread=_names().get(ident, ""),
        is_own=ident == training_thread().ident,
        taken_at=place,
        stack=thread_stack(ident),
    )


def _text(use: _LockUse, frame: FrameType) -> str:
    """The expression in the user's code; the caller's, if a class of threading acquires its own lock."""
    if frame.f_code.co_filename != threading.__file__ or frame.f_back is None:
        return ast.unparse(use.lock)
    file, line, _ = place_in(frame.f_back, frame.f_back.f_lineno)
    uses = (one for one in _uses(file) if one.first <= line <= one.last)
    return next((ast.unparse(one.lock) for one in uses), ast.unparse(use.lock))


def _holder(lock: Any) -> tuple[int | None, Frame | None]:
    """The thread that holds a lock, and where it acquired it, as far as each is known."""
    owner = _OWNER.search(repr(lock))
    known = current_frames()
    asked = [ident for ident in known if owner is None or ident == int(owner[1])]
    for ident in asked:
        frames = traceback.walk_stack(known[ident])
        # Libraries hold their locks only briefly, and parsing them takes long.
        for frame, line in ((frame, line) for frame, line in frames if is_user_code(frame.f_code.co_filename)):
            for use in _uses(frame.f_code.co_filename):
                if use.last < line <= use.end and _named(use.lock, frame) is lock:
                    code = frame.f_code
                    return ident, Frame(file=code.co_filename, line=use.first, function=code.co_name)
    return (int(owner[1]) if owner else None), None


def _is_held(lock: Any) -> bool:
    return isinstance(lock, _LOCKS) and repr(lock).startswith("<locked ")


def _named(name: ast.expr, frame: FrameType) -> Any:
    """The value of an expression of names and attributes; for a condition, its lock; None for anything else."""
    found = _value(name, frame)
    return getattr(found, "_lock", None) if isinstance(found, threading.Condition) else found


def _value(name: ast.expr, frame: FrameType) -> Any:
    if isinstance(name, ast.Name):
        return frame.f_locals.get(name.id, frame.f_globals.get(name.id))
    if isinstance(name, ast.Attribute) and (owner := _value(name.value, frame)) is not None:
        return getattr_static(owner, name.attr, None)
    return None


@lru_cache(maxsize=64)
def _uses(file: str) -> tuple[_LockUse, ...]:
    found = []
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.With):
            for lock in (item.context_expr for item in node.items):
                found.append(_LockUse(lock, lock.lineno, last_line(lock), last_line(node)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES:
            found.append(_LockUse(node.func.value, node.lineno, last_line(node)))
    return tuple(found)
