"""The thread lock that this process's main thread waits for, and which of its threads holds it.

Python does not record which thread holds a lock, so the source shows it: a thread in the block of a ``with`` statement
holds the lock that the statement's expression names. The expression is evaluated without running any code.
"""

import ast
import inspect
import linecache
import re
import sys
import threading
import traceback
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import Frame, ThreadLockFacts
from lightning_ncclsafe.probes.process.stacks import is_user_code, main_thread_frames, thread_stack, training_thread
from lightning_ncclsafe.probes.process.syntax import syntax_tree

_KINDS = (type(threading.Lock()), type(threading.RLock()))
_TAKES = ("acquire", "__enter__")
# Checked on a line before the whole file is parsed.
_TAKES_ONE = re.compile(r"\bwith\b|\.acquire\(|\.__enter__\(")
_OWNER = re.compile(r" owner=(\d+) ")


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


def waited_for() -> ThreadLockFacts | None:
    """The lock that the main thread waits for; None if it waits for none, or nothing shows which thread holds it."""
    frame = next(main_thread_frames(), None)
    if frame is None or not _TAKES_ONE.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
        return None
    uses = (use for use in _uses(frame.f_code.co_filename) if use.first <= frame.f_lineno <= use.last)
    found = ((use, lock) for use in uses if (lock := _named(use.lock, frame)) is not None and _is_held(lock))
    use, lock = next(found, (None, None))
    if use is None:
        return None
    ident, place = _holder(lock)
    if ident is None:
        return None
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return ThreadLockFacts(
        lock=_text(use, frame),
        thread=names.get(ident, ""),
        is_own=ident == training_thread().ident,
        taken_at=place,
        stack=thread_stack(ident),
    )


def _text(use: _LockUse, frame: FrameType) -> str:
    """The expression in the user's code; the caller's, if a class of threading acquires its own lock."""
    if frame.f_code.co_filename != threading.__file__ or frame.f_back is None:
        return ast.unparse(use.lock)
    line = frame.f_back.f_lineno
    uses = (one for one in _uses(frame.f_back.f_code.co_filename) if one.first <= line <= one.last)
    return next((ast.unparse(one.lock) for one in uses), ast.unparse(use.lock))


def _holder(lock: Any) -> tuple[int | None, Frame | None]:
    """The thread that holds a lock, and where it acquired it, as far as each is known."""
    owner = _OWNER.search(repr(lock))
    known = sys._current_frames()
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
    return isinstance(lock, _KINDS) and repr(lock).startswith("<locked ")


def _named(name: ast.expr, frame: FrameType) -> Any:
    """The value of an expression of names and attributes; for a condition, its lock; None for anything else."""
    found = _value(name, frame)
    return getattr(found, "_lock", None) if isinstance(found, threading.Condition) else found


def _value(name: ast.expr, frame: FrameType) -> Any:
    if isinstance(name, ast.Name):
        return frame.f_locals.get(name.id, frame.f_globals.get(name.id))
    if isinstance(name, ast.Attribute) and (owner := _value(name.value, frame)) is not None:
        return inspect.getattr_static(owner, name.attr, None)
    return None


@lru_cache(maxsize=64)
def _uses(file: str) -> tuple[_LockUse, ...]:
    found = []
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, ast.With):
            for lock in (item.context_expr for item in node.items):
                found.append(_LockUse(lock, lock.lineno, lock.end_lineno or lock.lineno, node.end_lineno or 0))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES:
            found.append(_LockUse(node.func.value, node.lineno, node.end_lineno or node.lineno))
    return tuple(found)
