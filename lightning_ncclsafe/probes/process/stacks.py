"""Python stacks of this process, with the source of their lines."""

import ast
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from lightning_ncclsafe.code.libraries import ALL_OF_TORCH, COLLECTIVES, DISTRIBUTED, LOADING, TRAINER_RUN, Code
from lightning_ncclsafe.code.marks import mark_at
from lightning_ncclsafe.code.raised import text_of
from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.facts import ELSE, ExceptionFacts, Frame

# Python's own recursion limit is 1,000; a report needs both ends of a stack, not its middle.
_MAX_FRAMES = 120
_MAX_MESSAGE = 2000
_MAX_CAUSES = 4
# Of the user's lines above a collective.
_MAX_USERS = 8
# What storage is given for a source file where somebody waits for it: that storage may be why ranks stand still.
_READ_S = 0.5

_PACKAGE = str(Path(__file__).parents[2])
_OWN = f"{_PACKAGE}{os.sep}"
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# torch.compile names its modules, and their folders, after a hash; a cache may be anywhere.
_GENERATED = re.compile(r"/torchinductor_[^/]*/|/([a-z2-7]{2})/c\1[a-z2-7]{40,}\.py$|/\.triton/cache/")
# A condition that only some ranks fulfil, in the words that Lightning, torch and common training scripts use.
_RANK_WORDS = re.compile(
    r"\b(?:is_global_zero|is_master|is_main_process|is_local_main_process|is_rank_zero|is_rank_0|is_first_rank"
    r"|global_rank|local_rank|node_rank|get_rank|rank|LOCAL_RANK|RANK)\b"
)


# Some programs have another thread for that than the main one, as Ray's workers do.
_trains: threading.Thread | None = None


def train_here() -> None:
    """This thread trains from now on: what is called the main thread's is that of this one."""
    global _trains
    _trains = threading.current_thread()


def training_thread() -> threading.Thread:
    """The thread that trains, or did last; the main thread before there was any."""
    return _trains if _trains is not None and _trains.is_alive() else threading.main_thread()


def main_thread_stack() -> tuple[Frame, ...]:
    """The main thread's Python stack, outermost frame first; that of the thread which trains if it is another one.

    Only the deepest frame has its source line, which shows whether it waits, unless storage does not answer;
    :func:`with_source` gives the others.
    """
    return thread_stack(training_thread().ident or 0)


def thread_stack(ident: int) -> tuple[Frame, ...]:
    """The same of any thread of this process.

    Args:
        ident: Python's number of the thread.
    """
    frame = sys._current_frames().get(ident)
    inner = _frames((f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame))
    deepest = tuple(replace(f, code=_line(f.file, f.line)) for f in inner[:1] if _is_read(f.file))
    return ((deepest or inner[:1]) + inner[1:])[::-1]


def calling_thread_stack() -> tuple[Frame, ...]:
    """That of a thread besides the main one which is in a collective that the user's code has called, or nothing."""
    main = training_thread().ident
    return calling(thread_stack(ident) for ident in [*sys._current_frames()] if ident != main)


def calling(stacks: Iterable[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The first of these stacks that ends in a collective which the user's code has called, or nothing."""
    return next(filter(_calls_collective, stacks), ())


def _calls_collective(stack: tuple[Frame, ...]) -> bool:
    below = [*itertools.takewhile(lambda frame: not frame.user, reversed(stack))]
    return len(below) < len(stack) and any(COLLECTIVES.has(frame.file, frame.function) for frame in below)


def call_site(places: Iterable[tuple[str, int, str]]) -> tuple[str, tuple[Frame, ...]]:
    """Where a collective was called: what its stack below the Trainer comes to, and those of its frames that tell most.

    Args:
        places: File, line and function of each frame, the innermost first.

    Returns:
        A digest, the same on other ranks that have called it there, wherever their packages are installed; and what
        has called ``torch.distributed``, and lines of the user's, the outermost first. Nothing where there is no stack.
    """
    inside: list[Frame] = []
    for place in places:
        inside.append(seen_frame(*place))
        if TRAINER_RUN.has(inside[-1].file, inside[-1].function):
            break
    if not inside:
        return "", ()
    told = "|".join(f"{'/'.join(Path(f.file).parts[-2:])}:{f.line}:{f.function}" for f in inside)
    caller = next((index for index, f in enumerate(inside) if not _passes_on(f)), None)
    users = [index for index, f in enumerate(inside) if f.user][:_MAX_USERS]
    kept = sorted({index for index in (caller, *users) if index is not None}, reverse=True)
    return blake2b(told.encode(), digest_size=6).hexdigest(), tuple(inside[index] for index in kept)


def telling_frames(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    """Of what :func:`call_site` gives: no user's frames, the user's deepest line, and that under a rank condition.

    Reads source files, as :func:`with_source` does.
    """
    sourced = with_source(stack)
    users = [frame for frame in reversed(sourced) if frame.user]
    told = {*users[:1], *[frame for frame in users if frame.rank_condition][:1]}
    return tuple(frame for frame in sourced if not frame.user or frame in told)


def _passes_on(frame: Frame) -> bool:
    return DISTRIBUTED.has(frame.file, frame.function) or frame.file.startswith(_OWN)


def exception_facts(error: BaseException, *, is_consequence: bool) -> ExceptionFacts:
    """An exception's type and message, and where it was raised.

    Args:
        error: The exception.
        is_consequence: Whether it only reports that a collective failed.
    """
    message = text_of(error)[:_MAX_MESSAGE]
    stack = _raised_in(error)
    return ExceptionFacts(type=type(error).__name__, message=message, stack=stack, is_consequence=is_consequence)


def _raised_in(error: BaseException) -> tuple[Frame, ...]:
    """Its traceback, and that of what it was made of, where the user's line was in that.

    What the user has made of an exception was raised in the user's line. Other libraries, and Python, leave the user's
    line to the exception that it was made of: a StopIteration that leaves a generator becomes a RuntimeError, which is
    raised outside of the generator.
    """
    stack, cause = _traceback_frames(error.__traceback__), error.__cause__
    for _ in range(_MAX_CAUSES):
        below = _traceback_frames(cause.__traceback__) if cause is not None else ()
        if not below or (stack and stack[-1].user and _caught_in(stack, below[0])):
            break
        stack += below if any(frame.user for frame in below) else ()
        cause = cause.__cause__ if cause is not None else None
    return stack


def _caught_in(stack: tuple[Frame, ...], outermost: Frame) -> bool:
    """Whether an exception whose traceback begins in this frame was caught by a function of this stack."""
    return any((frame.file, frame.function) == (outermost.file, outermost.function) for frame in stack)


def drop_passing_frames(error: BaseException) -> None:
    """Takes out of an exception's traceback, and out of those of its causes, the frames of ours that hand a call on.

    Frames of ours stay where ours has raised it, or what ours has called for itself: Python's library, or torch.

    Args:
        error: The exception. Its traceback is changed in place: whoever holds a part of it sees the same.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without_passing(one.__traceback__)
            errors += [one.__cause__, one.__context__]


def _without_passing(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    is_handed_on = False
    for entry in reversed(entries):
        code = entry.tb_frame.f_code
        # Also of what is left out: the interpreter may still hold the first of them.
        entry.tb_next = kept
        if not code.co_filename.startswith(_OWN):
            is_handed_on = not _serves_ours(code.co_filename, code.co_name)
        if not is_handed_on or not code.co_filename.startswith(_OWN):
            kept = entry
    return kept


def _serves_ours(file: str, function: str) -> bool:
    """Whether ours calls this code for itself; it hands on to Lightning, to users, and to what gives their data."""
    if LOADING.has(file, function):
        return False
    is_library = file.startswith(("<frozen ", *_LIBRARY)) and "-packages" not in file
    return is_library or ALL_OF_TORCH.has(file, function)


def main_thread_frames(code: Code | None = None) -> Iterator[Any]:
    """The main thread's frames, innermost first; only those in there if that is given."""
    frame = sys._current_frames().get(training_thread().ident or 0)
    for inner, _ in traceback.walk_stack(frame):
        if code is None or code.has(inner.f_code.co_filename, inner.f_code.co_name):
            yield inner


def with_source(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    """The same stack with source lines; for those of the user's with rank condition, handler and loop.

    Reads source files, so it can be slow where they lie on storage that is.
    """
    return tuple(
        replace(
            frame,
            code=_line(frame.file, frame.line),
            rank_condition=rank_condition(frame.file, frame.line) if frame.user else "",
            handler=_around(frame.file).handlers.get(frame.line, "") if frame.user else "",
            loop=_around(frame.file).loops.get(frame.line, "") if frame.user else "",
        )
        for frame in stack
    )


def with_source_in_time(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    """The same, for whoever cannot wait for storage: what it does not give within a moment is left out."""
    return tuple(with_source([frame])[0] if _is_read(frame.file) else frame for frame in stack)


def _line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


_read: set[str] = set()
_source_thread = SideThread("ncclsafe-source")


def _is_read(file: str) -> bool:
    """Whether the lines of a file are known, as far as there are any, or can be had in a moment."""
    if file in _read or file.startswith("<"):
        return True

    def read() -> None:
        linecache.getlines(file)
        _read.add(file)

    with suppress(Exception):  # what cannot be read is left out
        _source_thread.call(read, _READ_S)
    return file in _read


def seen_frame(file: str, line: int, function: str) -> Frame:
    """A frame with what its place tells, as Python or faulthandler names it."""
    return Frame(file=file, line=line, function=function, user=is_user_code(file), mark=mark_at(file, line, function))


def is_user_code(file: str) -> bool:
    """Whether a source file is the user's own: neither the standard library, nor installed, nor ours.

    Code typed into a notebook (``<ipython-input-…>``) is; code that libraries generate (``<frozen …>``, ``<string>``)
    is not, nor what torch.compile and Triton leave in their caches.
    """
    if file.startswith("<"):
        return file.startswith("<ipython-input")
    if _GENERATED.search(file.replace("\\", "/")):
        return False
    return not file.startswith((_PACKAGE, *_INSTALLED)) and "site-packages" not in file and "dist-packages" not in file


def rank_condition(file: str, line: int) -> str:
    """The condition on the rank under which a line runs, e.g. ``"if trainer.is_global_zero:  (line 41)"``.

    Finds an enclosing ``if`` whose test names the rank, and an earlier ``if not is_master(): return`` of the same
    function. Empty where there is none or the source cannot be read.
    """
    return _around(file).conditions.get(line, "")


class _Around(NamedTuple):
    """What encloses the lines of a source file, by line."""

    conditions: dict[int, str]
    handlers: dict[int, str]
    loops: dict[int, str]


@lru_cache(maxsize=64)
def _around(file: str) -> _Around:
    found = _Around({}, {}, {})
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return found
    # Outside in, so the innermost wins.
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            _mark_block(getattr(node, field, None), file, found.conditions)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            text = _statement(file, node.lineno)
            found.loops.update(dict.fromkeys(range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1), text))
    _mark_handled(tree.body, "", file, found.handlers)
    return found


def _statement(file: str, line: int) -> str:
    return f"{linecache.getline(file, line).strip()}  (line {line})"


def _mark_handled(block: Iterable[ast.stmt], handler: str | None, file: str, found: dict[int, str]) -> None:
    """Marks the lines that are come to unless an exception is raised; under a condition (None) there are other ways."""
    for node in block:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            _mark_handled(node.body, "", file, found)
            continue
        body, orelse, finalbody = (getattr(node, field, []) for field in ("body", "orelse", "finalbody"))
        if handler:
            last = max(node.lineno, body[0].lineno - 1) if body else (node.end_lineno or node.lineno)
            found.update(dict.fromkeys(range(node.lineno, last + 1), handler))
        is_condition = isinstance(node, (ast.If, ast.While))
        inner = None if is_condition else handler
        if handler is not None and isinstance(node, (ast.Try, ast.With)) and (line := _goes_on_at(node)):
            inner = _statement(file, line)
        _mark_handled(body, inner, file, found)
        _mark_handled((*orelse, *finalbody), None if is_condition else handler, file, found)
        for clause in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            _mark_handled(clause.body, None, file, found)


def _goes_on_at(node: ast.Try | ast.With) -> int:
    """The line of the first ``except`` clause that does not end by raising, or of a ``with suppress()``; else 0."""
    if isinstance(node, ast.With):
        calls = (item.context_expr for item in node.items)
        is_suppress = any(isinstance(call, ast.Call) and "suppress" in ast.unparse(call.func) for call in calls)
        return node.lineno if is_suppress else 0
    kept = (one for one in node.handlers if not isinstance(one.body[-1], ast.Raise) and not _ends_iteration(one))
    return next((one.lineno for one in kept), 0)


def _ends_iteration(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and ast.unparse(handler.type) in ("StopIteration", "StopAsyncIteration")


def _mark_block(block: object, file: str, found: dict[int, str]) -> None:
    """Marks the lines of a block that run only on some ranks."""
    if not isinstance(block, list):
        return
    for index, statement in enumerate(block):
        if not isinstance(statement, ast.If) or not _RANK_WORDS.search(ast.unparse(statement.test)):
            continue
        guarded = statement.body
        if statement.body and isinstance(statement.body[-1], (ast.Return, ast.Continue, ast.Raise)):
            guarded = guarded + block[index + 1 :]
        text = _statement(file, statement.lineno)
        for told, lines in ((text, guarded), (ELSE + text, statement.orelse)):
            for inner in lines:
                found.update(dict.fromkeys(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1), told))


def _traceback_frames(trace: TracebackType | None) -> tuple[Frame, ...]:
    return _frames((f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(trace))


def _frames(places: Iterable[tuple[str, int, str]]) -> tuple[Frame, ...]:
    frames = [seen_frame(*place) for place in places]
    if len(frames) > _MAX_FRAMES:
        frames = frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]
    return tuple(frames)
