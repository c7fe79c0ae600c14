"""What the Python objects of a rank tell: its exceptions, its Trainer's counters, the process group it waits in."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from lightning_ncclsafe.code.libraries import C10D, RUN_MODULE, is_top_level
from lightning_ncclsafe.facts import Group
from lightning_ncclsafe.inspecting.layouts import is_known
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.objects import Interpreter, ReadException
from lightning_ncclsafe.inspecting.sources import folder_of, from_storage, remember_sources, whole
from lightning_ncclsafe.inspecting.trainer_counters import TrainerCounters, counters_of

# Reading takes 0.01 s of CPU time, which a busy host may not give at once.
_MEMORY_S = 10.0
_MODULE = "torch.distributed.distributed_c10d"


class UnreadObjects(Enum):
    """Why a rank's objects were not read."""

    OTHER_PYTHON = "it runs another Python than this process"
    UNKNOWN_PYTHON = "this process's own Python has objects of an unknown layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObjects:
    """What the objects of a rank tell.

    Attributes:
        handled: Exceptions that its main thread handles, the latest first.
        left: Exceptions that have left its program, the latest first.
        counters: What its Trainer has counted; None if unknown.
        group: The process group of the collective that it is in; None if unknown.
        unread: Why nothing was read; None if it was.
    """

    handled: tuple[ReadException, ...] = ()
    left: tuple[ReadException, ...] = ()
    counters: TrainerCounters | None = None
    group: Group | None = None
    unread: UnreadObjects | None = None


def objects_of(pid: int, stack: Sequence[SeenFrame]) -> RankObjects | None:
    """Reads the objects of a rank that stands still; None if that fails, or if two readings differ.

    Args:
        pid: Its process.
        stack: Of its main thread.
    """
    if not is_known():
        return RankObjects(unread=UnreadObjects.UNKNOWN_PYTHON)
    # The kernel does not read a process whose memory is locked, for example by a thread that waits for storage.
    read = partial(from_storage, partial(_read, pid, stack), None, within_s=_MEMORY_S)
    found = read()
    if found is None or read() != found:
        return None
    folder = folder_of(pid)
    handled, left = (tuple(_in_folder(folder, raised) for raised in chain) for chain in (found.handled, found.left))
    files = {file for raised in (*handled, *left) for file, *_ in raised.places}
    from_storage(partial(remember_sources, pid, files), None)
    return replace(found, handled=handled, left=left)


def _read(pid: int, stack: Sequence[SeenFrame]) -> RankObjects:
    with Interpreter(pid) as interpreter:
        if not interpreter.is_same:
            return RankObjects(unread=UnreadObjects.OTHER_PYTHON)
        return RankObjects(
            handled=interpreter.handled(),
            left=interpreter.printed() if is_past_program(stack) else (),
            counters=counters_of(interpreter, stack),
            group=group_of(interpreter, stack),
        )


def _in_folder(folder: str, raised: ReadException) -> ReadException:
    places = tuple((whole(file, folder), line, function) for file, line, function in raised.places)
    return replace(raised, places=places)


def is_past_program(stack: Sequence[SeenFrame]) -> bool:
    """Whether the program has ended and Python does the rest: it joins threads and calls functions of ``atexit``."""
    if not stack or RUN_MODULE.has(stack[0].file, stack[0].function):
        return False
    # A program is a module's top level, from which Python does not call those functions.
    return not is_top_level(stack[0].function) or not any(frame.is_users for frame in stack)


def group_of(interpreter: Interpreter, stack: Sequence[SeenFrame]) -> Group | None:
    """The group of the collective that a stack is in, with its members; None if it is in none or cannot be read.

    Args:
        interpreter: Of the process.
        stack: Of its main thread.
    """
    inside = (frame.addresses.get("group", 0) for frame in reversed(stack) if C10D.has(frame.file, frame.function))
    with suppress(LookupError, OSError, ValueError):
        if group := next(filter(None, inside), 0):
            name = interpreter.value(interpreter.under(interpreter.named(_MODULE, "_pg_names"), group))
            members = interpreter.under(interpreter.named(_MODULE, "_pg_group_ranks"), group)
            return Group(name=str(name), ranks=tuple(sorted(interpreter.numbers_of(members))))
    return None
