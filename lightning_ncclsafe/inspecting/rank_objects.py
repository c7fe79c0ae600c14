"""What the Python objects of a rank show: its exceptions, its Trainer's counters, the process group it waits in."""

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial

from lightning_ncclsafe.code.libraries import (
    C10D,
    FITTING,
    RUN_MODULE,
    SETUP_OF_LOADERS,
    SIGTERM_BROADCAST,
    TRAINER_CALL,
    TRAINING_LOOPS,
    is_top_level,
)
from lightning_ncclsafe.facts import (
    CaughtException,
    ExceptionFacts,
    Frame,
    Group,
    LoopEnd,
    Phase,
    Progress,
    TrainerFacts,
)
from lightning_ncclsafe.inspecting.layouts import is_known
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.objects import Interpreter, ReadException
from lightning_ncclsafe.inspecting.sources import folder_of, from_storage, is_users_file, remember_sources, whole
from lightning_ncclsafe.probes.process.caught import first_line, own_frames
from lightning_ncclsafe.probes.process.stacks import with_source
from lightning_ncclsafe.probes.source.syntax import syntax_tree
from lightning_ncclsafe.reading.tracebacks import is_consequence

_SETTINGS = {
    "max_epochs": ("fit_loop", "max_epochs"),
    "max_steps": ("fit_loop", "epoch_loop", "max_steps"),
    **{
        name: (name,)
        for name in (
            "limit_train_batches",
            "limit_val_batches",
            "accumulate_grad_batches",
            "val_check_interval",
            "check_val_every_n_epoch",
            "num_sanity_val_steps",
            "gradient_clip_val",
        )
    },
}
_EPOCH_LOOP = ("fit_loop", "epoch_loop")
_TRAINING = (*_EPOCH_LOOP, "batch_progress")
_VALIDATION = (*_EPOCH_LOOP, "val_loop", "batch_progress")
_STEPS = (
    (*_EPOCH_LOOP, "automatic_optimization", "optim_progress", "optimizer", "step", "total", "completed"),
    (*_EPOCH_LOOP, "manual_optimization", "optim_step_progress", "total", "completed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCounters:
    """What the Trainer's ``fit`` has counted.

    Attributes:
        epoch: Current epoch, from 0.
        global_step: Optimizer steps taken.
        batch_idx: Index of the batch, in training and in its validation; -1 before the first.
        is_last: Whether that batch is the last one of the data, in training and in its validation.
        trainer: Its settings, and the reason for which its loop would end.
    """

    epoch: int
    global_step: int
    batch_idx: tuple[int, int]
    is_last: tuple[bool, bool]
    trainer: TrainerFacts

    def within(self, progress: Progress) -> Progress:
        """The same progress, with these counts."""
        if progress.phase in (Phase.UNKNOWN, Phase.FINISHED):
            return progress
        loop = int(progress.phase in (Phase.VALIDATE, Phase.SANITY_CHECK))
        return replace(
            progress,
            epoch=self.epoch,
            global_step=self.global_step,
            batch_idx=self.batch_idx[loop],
            is_last_batch=self.is_last[loop],
        )


def counters_of(interpreter: Interpreter, stack: Sequence[SeenFrame]) -> TrainerCounters | None:
    """The counters of the Trainer that a stack is in; None if it is not in ``fit``, or if they cannot be read."""
    trainer = next((frame.addresses.get("self", 0) for frame in stack if FITTING.has(frame.file, frame.function)), 0)
    with suppress(LookupError, OSError, ValueError):
        # Lightning counts a batch only after the ranks have exchanged a signal before it.
        is_next = SIGTERM_BROADCAST.has_any(stack)
        # It resets the counters only once it has the loader of a new epoch.
        is_new = any(
            SETUP_OF_LOADERS.has(frame.file, frame.function) and TRAINING_LOOPS.has(frame.file, frame.function)
            for frame in stack
        )
        return _counted(interpreter, trainer, is_next=is_next, is_new=is_new) if trainer else None
    return None


def _counted(interpreter: Interpreter, trainer: int, *, is_next: bool, is_new: bool) -> TrainerCounters:
    def number(*names: str) -> int:
        found = interpreter.value(trainer, *names)
        if not isinstance(found, int):
            raise LookupError(names[-1])
        return found

    def some(*names: str) -> int:
        with suppress(LookupError):
            return number(*names)
        return 0

    ready, last = number(*_TRAINING, "current", "ready"), bool(some(*_TRAINING, "is_last_batch"))
    if is_new:
        ready, last = 0, False
    validated, last_validated = some(*_VALIDATION, "current", "ready"), bool(some(*_VALIDATION, "is_last_batch"))
    steps = max(some(*names) for names in _STEPS)
    settings = {}
    for name, names in _SETTINGS.items():
        with suppress(LookupError):
            settings[name] = str(interpreter.value(trainer, *names))
    return TrainerCounters(
        epoch=number("fit_loop", "epoch_progress", "current", "completed"),
        global_step=steps,
        batch_idx=(ready - 1 + is_next, validated - 1),
        is_last=(last and not is_next, last_validated),
        trainer=TrainerFacts(
            settings=settings,
            callbacks=interpreter.kinds(trainer, "callbacks"),
            validates_by_clock=_validates_by_clock(interpreter, trainer),
            end=_end(interpreter, trainer, ready, last, steps),
            batches_begun=ready,
            batches_before=total - ready if (total := some(*_TRAINING, "total", "ready")) else None,
            batches=some("fit_loop", "max_batches") or None,
            validated=some(*_VALIDATION, "current", "completed"),
        ),
    )


def _end(interpreter: Interpreter, trainer: int, ready: int, is_last: bool, steps: int) -> LoopEnd:
    """The same as `TrainerProbe` finds on its own rank."""
    if interpreter.value(trainer, "should_stop"):
        return LoopEnd.SHOULD_STOP
    count = interpreter.value(trainer, "fit_loop", "max_batches")
    if not ready or (ready >= count if isinstance(count, int) else is_last):
        return LoopEnd.DATA
    most = interpreter.value(trainer, *_SETTINGS["max_steps"])
    if isinstance(most, int) and -1 != most <= steps:
        return LoopEnd.MAX_STEPS
    others = {interpreter.value(trainer, *_TRAINING, "current", name) for name in ("started", "completed")}
    return LoopEnd.DATA if others == {ready} else LoopEnd.UNKNOWN


def _validates_by_clock(interpreter: Interpreter, trainer: int) -> bool:
    with suppress(LookupError):
        return interpreter.value(trainer, "_val_check_time_interval") is not None
    return False


# Reading takes 0.01 s of CPU time, which a busy host may not give at once.
_MEMORY_S = 10.0
_MODULE = "torch.distributed.distributed_c10d"


class UnreadObjects(Enum):
    """Why a rank's objects were not read."""

    OTHER_PYTHON = "it runs another Python than this process"
    UNKNOWN_PYTHON = "this process's own Python has objects of an unknown layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObjects:
    """What the objects of a rank show.

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

    @property
    def errors(self) -> list[ReadException]:
        """Its exceptions, but for those that end an iteration, a generator, or a Trainer that was asked to stop."""
        return [one for one in (*self.left, *self.handled) if one.type not in _CONTROL_FLOW]

    @property
    def has_failed(self) -> bool:
        """Whether an exception has left the rank's program or its Trainer; this does not need the source."""
        return bool(self.errors) and (bool(self.left) or any(map(_has_left_trainer, self.errors)))


def objects_of(pid: int, stack: Sequence[SeenFrame]) -> RankObjects | None:
    """Reads the objects of a rank that stands still; None if that fails, or if two readings differ.

    Args:
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

    def placed(raised: ReadException) -> ReadException:
        places = tuple((whole(file, folder), line, function) for file, line, function in raised.places)
        return replace(raised, places=places)

    handled, left = tuple(map(placed, found.handled)), tuple(map(placed, found.left))
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


def is_past_program(stack: Sequence[SeenFrame]) -> bool:
    """Whether the program has ended and Python does the rest: it joins threads and calls ``atexit`` handlers."""
    if not stack or RUN_MODULE.has(stack[0].file, stack[0].function):
        return False
    # A program is a module's top level, from which Python does not call those functions.
    return not is_top_level(stack[0].function) or not any(frame.is_users for frame in stack)


def group_of(interpreter: Interpreter, stack: Sequence[SeenFrame]) -> Group | None:
    """The group of the collective that a stack is in, with its members; None if it is in none or cannot be read."""
    inside = (frame.addresses.get("group", 0) for frame in reversed(stack) if C10D.has(frame.file, frame.function))
    with suppress(LookupError, OSError, ValueError):
        if group := next(filter(None, inside), 0):
            name = interpreter.value(interpreter.under(interpreter.named(_MODULE, "_pg_names"), group))
            members = interpreter.under(interpreter.named(_MODULE, "_pg_group_ranks"), group)
            return Group(name=str(name), ranks=tuple(sorted(interpreter.numbers_of(members))))
    return None


_CONTROL_FLOW = {"StopIteration", "StopAsyncIteration", "GeneratorExit", "_TunerExitException", "SIGTERMException"}
# These concern the rank itself, even if their message looks like a consequence of another rank's end.
_OWN = {"SystemExit", "KeyboardInterrupt"}

Errors = tuple[ExceptionFacts | None, tuple[CaughtException, ...]]


def errors_of(objects: RankObjects, stack: Sequence[Frame], since_s: float = 0.0) -> Errors:
    """The exception that has ended a rank's work, or else the one that its code still handles.

    Args:
        objects: What was read of the rank.
        stack: The stack of its main thread with its source, outermost frame first.
        since_s: Seconds for which it is known to have stood there.
    """
    errors = objects.errors
    if not errors:
        return None, ()
    # Of several, the one that left the Trainer: later ones were raised while it ended.
    ending = next((one for one in errors if _has_left_trainer(one)), errors[0])
    if objects.left or _has_left_trainer(ending) or _passes(ending, stack):
        return _ended(ending), ()
    return None, (_caught(errors[0], stack, since_s),)


def _has_left_trainer(one: ReadException) -> bool:
    return any(TRAINER_CALL.has(file, function) for file, _, function in one.places)


def _ended(one: ReadException) -> ExceptionFacts:
    return ExceptionFacts(
        type=one.type,
        message=one.message,
        stack=with_source(_frames(one.places)),
        is_consequence=_is_consequence(one),
    )


def _caught(one: ReadException, stack: Sequence[Frame], since_s: float) -> CaughtException:
    return CaughtException(
        type=one.type,
        message=first_line(one.message),
        stack=with_source(own_frames([*_frames(one.places)])),
        caught_at=_handler(one, stack),
        ago_s=round(since_s, 1),
        is_held=True,
        is_consequence=_is_consequence(one),
    )


def _is_consequence(one: ReadException) -> bool:
    return one.type not in _OWN and is_consequence(one.type, one.message)


def _frames(places: Iterable[tuple[str, int, str]]) -> Iterator[Frame]:
    for file, line, function in places:
        yield Frame(file=file, line=line, function=function, user=is_users_file(file))


def _handler(one: ReadException, stack: Sequence[Frame]) -> Frame | None:
    """The frame that handles an exception, as it is on the stack now."""
    file, _, function = one.places[0] if one.places else ("", 0, "")
    return next((frame for frame in reversed(stack) if (frame.file, frame.function) == (file, function)), None)


def _passes(one: ReadException, stack: Sequence[Frame]) -> bool:
    """Whether the exception will leave the block that handles it: a ``finally``, or an ``except`` that raises again."""
    frame = _handler(one, stack)
    return frame is not None and bool(linecache.getlines(frame.file)) and frame.line not in _keeping(frame.file)


@lru_cache(maxsize=64)
def _keeping(file: str) -> frozenset[int]:
    """The lines of ``except`` blocks that end without raising."""
    blocks = (node for node in ast.walk(syntax_tree(file)) if isinstance(node, ast.ExceptHandler))
    kept = (block for block in blocks if not isinstance(block.body[-1], ast.Raise))
    return frozenset(line for block in kept for line in range(block.lineno, (block.end_lineno or block.lineno) + 1))
