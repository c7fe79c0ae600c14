"""Python stacks of this process, with the source of their lines."""

import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from lightning_ncclsafe.code.libraries import (
    ALL_OF_TORCH,
    BACKWARD,
    COLLECTIVES,
    DISTRIBUTED,
    JOIN,
    LOADING,
    THREAD_START,
    TRAINER_RUN,
    Code,
    is_top_level,
)
from lightning_ncclsafe.code.marks import mark_at
from lightning_ncclsafe.code.raised import text_of
from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.facts import ExceptionFacts, Frame
from lightning_ncclsafe.probes.process.thread_frames import current_frames
from lightning_ncclsafe.probes.source.control_flow import control_flow

T = TypeVar("T")

# Python's own recursion limit is 1,000; a report needs both ends of a stack, not its middle.
_MAX_FRAMES = 120
_MAX_HANDLED = 400
_MAX_MESSAGE = 2000
_MAX_CAUSES = 4
# User lines above a collective that a report shows.
_MAX_USERS = 8
_MOST_SHOWN = 4
# The longest wait for a source file: its storage may be the very reason why ranks are stuck.
_READ_S = 0.5

_PACKAGE = str(Path(__file__).parents[2])
_OWN = f"{_PACKAGE}{os.sep}"
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# torch.compile names its modules, and their folders, after a hash; a cache may be anywhere.
_GENERATED = re.compile(r"/torchinductor_[^/]*/|/([a-z2-7]{2})/c\1[a-z2-7]{40,}\.py$|/\.triton/cache/")

# Some programs train on another thread than the main one, as Ray's workers do.
_trains: threading.Thread | None = None


def train_here() -> None:
    """Declares the calling thread the one that trains: "the main thread" means this one from now on."""
    global _trains
    _trains = threading.current_thread()


def training_thread() -> threading.Thread:
    """The thread that trains, or trained last; the main thread if none was declared."""
    return _trains if _trains is not None and _trains.is_alive() else threading.main_thread()


def main_thread_stack() -> tuple[Frame, ...]:
    """The Python stack of the thread that trains, outermost frame first.

    Only the deepest frame has its source line, which shows whether it waits, unless storage does not answer;
    :func:`with_source` gives the others. While it waits for autograd's thread, that one's frames follow its own.
    """
    main = training_thread().ident or 0
    stack = thread_stack(main)
    if not _is_in_backward(stack) or not _uses_cuda():
        return stack
    return with_backward(stack, (thread_stack(ident) for ident in [*current_frames()] if ident != main))


def with_backward(main: tuple[Frame, ...], others: Iterable[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The main thread's stack and, while it is in a backward pass on a GPU, that of the thread which runs this pass.

    Hooks and custom backward functions run there. Such a thread was not started by Python, and has frames only while
    it runs some.
    """
    if not _is_in_backward(main):
        return main
    return (*main, *next((stack for stack in others if stack and not _is_of_python(stack[0])), ()))


def _is_in_backward(stack: tuple[Frame, ...]) -> bool:
    return bool(stack) and BACKWARD.has(stack[-1].file, stack[-1].function)


def _is_of_python(outermost: Frame) -> bool:
    """Whether a thread was started by Python, or is the program's first one, which need not be the one that trains."""
    return is_top_level(outermost.function) or THREAD_START.has(outermost.file, outermost.function)


def _uses_cuda() -> bool:
    """Without importing torch, which not all readers of stacks need."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def thread_stack(ident: int) -> tuple[Frame, ...]:
    """The Python stack of any thread of this process."""
    frame = current_frames().get(ident)
    inner = _frames(itertools.starmap(place_in, traceback.walk_stack(frame)))
    deepest = tuple(replace(f, code=_line(f.file, f.line)) for f in inner[:1] if _is_read(f.file))
    return ((deepest or inner[:1]) + inner[1:])[::-1]


def calling_thread_stack() -> tuple[Frame, ...]:
    """The stack of a thread other than the main one that is in a collective which user code called; else empty.

    Autograd's thread does not count: its backward pass is the main thread's.
    """
    main = training_thread().ident or 0
    stacks = (thread_stack(ident) for ident in [*current_frames()] if ident != main)
    if _is_in_backward(thread_stack(main)):
        stacks = (stack for stack in stacks if stack and _is_of_python(stack[0]))
    return stack_in_collective(stacks)


def stack_in_collective(stacks: Iterable[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The first of these stacks that ends in a collective which user code called; else empty."""
    return next(filter(_calls_collective, stacks), ())


def _calls_collective(stack: tuple[Frame, ...]) -> bool:
    below = [*itertools.takewhile(lambda frame: not frame.user, reversed(stack))]
    return len(below) < len(stack) and COLLECTIVES.has_any(below)


def call_site(places: Iterable[tuple[str, int, str]]) -> tuple[str, tuple[Frame, ...]]:
    """Where a collective was called: a digest of its stack below the Trainer, and the frames worth showing.

    Args:
        places: File, line and function of each frame, the innermost first.

    Returns:
        A digest, equal on all ranks that called it from there, wherever their packages are installed; and the frame
        that called ``torch.distributed``, the frame of ``Join`` if there is one, and user frames, outermost first.
        Empty where there is no stack.
    """
    inside: list[Frame] = []
    for place in places:
        inside.append(seen_frame(*place))
        if TRAINER_RUN.has(inside[-1].file, inside[-1].function):
            break
    if not inside:
        return "", ()
    text = "|".join(f"{'/'.join(Path(f.file).parts[-2:])}:{f.line}:{f.function}" for f in inside)
    caller = next((index for index, f in enumerate(inside) if not _passes_on(f)), None)
    users = [index for index, f in enumerate(inside) if f.user][:_MAX_USERS]
    joined = next((index for index, f in enumerate(inside) if JOIN.has(f.file, f.function)), None)
    kept = sorted({index for index in (caller, joined, *users) if index is not None}, reverse=True)
    return blake2b(text.encode(), digest_size=6).hexdigest(), tuple(inside[index] for index in kept)


def frames_to_show(stacks: Iterable[Iterable[Frame]]) -> list[tuple[Frame, ...]]:
    """The frames of :func:`call_site` that a report shows: of user frames, the deepest and those with a branch.

    Of a function with a branch, or in which these stacks are at different lines, the line in each stack is shown: some
    may be past the branch. Reads source files, as :func:`with_source` does.
    """
    every = [with_source(stack) for stack in stacks]
    users = [frame for stack in every for frame in stack if frame.user]
    lines = {(frame.file, frame.function, frame.line) for frame in users}
    several = {place for place, count in Counter(place[:2] for place in lines).items() if count > 1}
    return [_shown(stack, several | {_function(frame) for frame in users if _has_branch(frame)}) for stack in every]


def _shown(stack: tuple[Frame, ...], telling: Set[tuple[str, str]]) -> tuple[Frame, ...]:
    users = [frame for frame in reversed(stack) if frame.user]
    branching = [frame for frame in users if _has_branch(frame)][:_MOST_SHOWN]
    kept = {*users[:1], *branching, *[frame for frame in users if _function(frame) in telling][:_MOST_SHOWN]}
    return tuple(frame for frame in stack if not frame.user or frame in kept)


def _function(frame: Frame) -> tuple[str, str]:
    return frame.file, frame.function


def _has_branch(frame: Frame) -> bool:
    return bool(frame.rank_condition or frame.branches)


def _passes_on(frame: Frame) -> bool:
    return DISTRIBUTED.has(frame.file, frame.function) or frame.file.startswith(_OWN)


def exception_facts(error: BaseException, *, is_consequence: bool) -> ExceptionFacts:
    """An exception's type and message, and where it was raised.

    Args:
        error: The exception.
        is_consequence: Whether it only reports that a collective failed.
    """
    message = text_of(error)[:_MAX_MESSAGE]
    return ExceptionFacts(
        type=type(error).__name__,
        message=message,
        stack=_raised_in(error),
        is_consequence=is_consequence,
        handled=_handled_by(error),
    )


def _handled_by(error: BaseException) -> str:
    """What was being handled as the program exited: nothing prints that, unlike what precedes other exceptions."""
    before = error.__cause__ or error.__context__
    if not isinstance(error, SystemExit) or before is None:
        return ""
    return f"{type(before).__name__}: {text_of(before)}"[:_MAX_HANDLED]


def _raised_in(error: BaseException) -> tuple[Frame, ...]:
    """Its traceback, followed by that of its cause where only the cause was raised in user code.

    An exception that user code raises from another one has the user's line in its own traceback. Libraries, and Python
    itself, leave that line in the cause: a StopIteration that leaves a generator becomes a RuntimeError, which is
    raised outside of the generator.
    """
    stack, cause = _traceback_frames(error.__traceback__), error.__cause__
    for _ in range(_MAX_CAUSES):
        below = _traceback_frames(cause.__traceback__) if cause is not None else ()
        # The traceback of a cause that user code has caught begins in a function of this stack.
        if not below or (stack and stack[-1].user and _function(below[0]) in map(_function, stack)):
            break
        stack += below if any(frame.user for frame in below) else ()
        cause = cause.__cause__ if cause is not None else None
    return stack


def drop_passing_frames(error: BaseException) -> None:
    """Removes this package's frames that only pass a call on from the tracebacks of an exception and its causes.

    They stay where this package raised the exception, or called what did for itself: Python's library, or torch.

    Args:
        error: The exception. Its traceback is changed in place: code that holds a part of it sees the change.
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
        # Also for entries that are left out: the interpreter may still hold the first of them.
        entry.tb_next = kept
        if not code.co_filename.startswith(_OWN):
            is_handed_on = not _serves_ours(code.co_filename, code.co_name)
        if not is_handed_on or not code.co_filename.startswith(_OWN):
            kept = entry
    return kept


def _serves_ours(file: str, function: str) -> bool:
    """Whether this package calls this code for itself; it passes calls on to Lightning, user code and data loading."""
    if LOADING.has(file, function):
        return False
    is_library = file.startswith(("<frozen ", *_LIBRARY)) and "-packages" not in file
    return is_library or ALL_OF_TORCH.has(file, function)


def training_thread_number() -> int:
    """The kernel's number of the main thread."""
    thread = training_thread()
    # After os.fork(), the main thread's `native_id` is still the parent's.
    return os.getpid() if thread is threading.main_thread() else thread.native_id or 0


def main_thread_frames(code: Code | None = None) -> Iterator[Any]:
    """The main thread's frames, innermost first; only those in there if that is given."""
    frame = current_frames().get(training_thread().ident or 0)
    for inner, _ in traceback.walk_stack(frame):
        if code is None or code.has(inner.f_code.co_filename, inner.f_code.co_name):
            yield inner


def with_source(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    """The same stack with source lines; user frames also with what decides whether their line is reached.

    Reads source files, so it is slow where their storage is.
    """
    return tuple(map(_with_source, stack))


def _with_source(frame: Frame) -> Frame:
    with_code = replace(frame, code=_line(frame.file, frame.line))
    if not frame.user:
        return with_code
    branches, condition, handler = control_flow(frame.file).around(frame.line)
    return replace(with_code, branches=branches, rank_condition=condition, handler=handler)


def with_source_in_time(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    """As :func:`with_source`, but leaves out what storage does not deliver within 0.5 s."""
    return tuple(with_source([frame])[0] if _is_read(frame.file) else frame for frame in stack)


def _line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


_read: set[str] = set()
_source_thread = SideThread("ncclsafe-source")


def _is_read(file: str) -> bool:
    """Whether the lines of a file are cached, or can be read within 0.5 s."""
    if file in _read or file.startswith("<"):
        return True

    def read() -> None:
        linecache.getlines(file)
        _read.add(file)

    with suppress(Exception):  # what cannot be read is left out
        _source_thread.call(read, _READ_S)
    return file in _read


def place_in(frame: FrameType, line: int | None) -> tuple[str, int, str]:
    """File, line and function of a frame.

    Args:
        frame: The frame.
        line: Its line. Python may know none (None, or -1), as in code that its compiler adds.

    Returns:
        The line is the first of the function if its own is unknown.
    """
    code = frame.f_code
    return code.co_filename, line if line is not None and line > 0 else code.co_firstlineno, code.co_name


def seen_frame(file: str, line: int, function: str) -> Frame:
    """The frame at a place, with what the place implies: whether it is user code, and its mark."""
    return Frame(file=file, line=line, function=function, user=is_user_code(file), mark=mark_at(file, line, function))


# In a training, the same files are asked about in each batch.
@lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Whether a source file is the user's own: not the standard library, not installed, not this package.

    Code typed into a notebook (``<ipython-input-…>``) is; code that libraries generate (``<frozen …>``, ``<string>``)
    and the caches of torch.compile and Triton are not.
    """
    if file.startswith("<"):
        return file.startswith("<ipython-input")
    if _GENERATED.search(file.replace("\\", "/")):
        return False
    return not file.startswith((_PACKAGE, *_INSTALLED)) and "site-packages" not in file and "dist-packages" not in file


def is_own_file(file: str) -> bool:
    """Whether a source file is one of this package."""
    return file.startswith(_OWN)


def _traceback_frames(trace: TracebackType | None) -> tuple[Frame, ...]:
    return _frames(itertools.starmap(place_in, traceback.walk_tb(trace)))


def _frames(places: Iterable[tuple[str, int, str]]) -> tuple[Frame, ...]:
    return tuple(seen_frame(*place) for place in both_ends([*places]))


def both_ends(stack: Sequence[T]) -> Sequence[T]:
    """A stack, of whatever frames; without its middle if it is deeper than 120."""
    return stack if len(stack) <= _MAX_FRAMES else [*stack[: _MAX_FRAMES // 2], *stack[-_MAX_FRAMES // 2 :]]
