"""Known code in stacks, and what it shows about everything below it: a collective, a loader, a logger, a checkpoint."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.libraries import RANK_ZERO_ONLY
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.rules.kit.frames import below_user, inside_trainer, is_in, last_user


class Kind(str, Enum):
    """What a main thread is in."""

    COLLECTIVE = "a collective"
    STORE = "a rendezvous"
    """The store, ``init_process_group``, creation of a group, ``monitored_barrier``."""
    LOADER = "the dataloader"
    LOGGER = "a logger"
    CHECKPOINT = "a checkpoint"
    LOCK = "the wait for a file lock"
    USER = "user code"
    LIGHTNING = "Lightning"
    """Lightning's or another library's code, with no user code below the Trainer."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Landmark:
    """What a known frame shows about everything below it.

    Attributes:
        kind: What the main thread is in.
        call: The function; for code of this package, its purpose.
        weak: Whether it counts only with a collective outstanding and no user code below it, because its C++ code both
            computes and waits.
        exempt: Whether Lightning waits there without limit on purpose.
    """

    kind: Kind
    call: str = ""
    weak: bool = False
    exempt: bool = False


_COLLECTIVE, _STORE = Landmark(Kind.COLLECTIVE), Landmark(Kind.STORE)
_LOADER, _LOGGER, _CHECKPOINT = Landmark(Kind.LOADER), Landmark(Kind.LOGGER), Landmark(Kind.CHECKPOINT)

# The first match decides, so exceptions come before the general entry of their file.
_BY_CODE = (
    (libraries.INFINITE_BARRIER, Landmark(Kind.STORE, exempt=True)),
    (libraries.OBJECT_PICKLING, Landmark(Kind.USER)),
    (libraries.GROUP_CREATION, _STORE),
    (libraries.RENDEZVOUS, _STORE),
    (libraries.COLLECTIVES, _COLLECTIVE),
    (libraries.SAVING_SHARDED, _CHECKPOINT),
    (libraries.BACKWARD, Landmark(Kind.COLLECTIVE, call="the backward pass", weak=True)),
    (libraries.DDP, Landmark(Kind.COLLECTIVE, weak=True)),
    (libraries.SHARDING, Landmark(Kind.COLLECTIVE, weak=True)),
    (libraries.DATALOADER, _LOADER),
    (libraries.FETCH, _LOADER),
    (libraries.FETCHERS, _LOADER),
    (libraries.LOGGING, _LOGGER),
    (libraries.WANDB_AGENT, None),
    (libraries.LOG_WRITERS, _LOGGER),
    (libraries.PYTHON_LOGGING, _LOGGER),
    (libraries.TEXT_OF_RECORDS, Landmark(Kind.USER)),
    (libraries.SAVE, _CHECKPOINT),
    (libraries.SAVING, _CHECKPOINT),
)
_BY_MARK = {
    Mark.STORE.value: Landmark(Kind.STORE, call="an agreement of all ranks"),
    Mark.VOTE.value: Landmark(Kind.COLLECTIVE, call="the vote on the next batch"),
    Mark.LOGGER.value: _LOGGER,
}


def innermost_landmark(inside: tuple[Frame, ...]) -> tuple[Landmark | None, tuple[Frame, ...]]:
    """The deepest landmark, and the frames around it; None and all frames if there is none."""
    user_waits = is_in(libraries.WAITS_FOR_OTHERS, below_user(inside))
    has_user = in_hook = False
    for depth in range(len(inside) - 1, -1, -1):
        landmark = _landmark(inside, depth)
        # A user's hook that is called while a checkpoint is assembled is not part of writing it.
        in_hook = in_hook or (has_user and is_in(libraries.PUTTING_CHECKPOINT_TOGETHER, inside[depth : depth + 1]))
        is_around = landmark is not None and landmark.kind is Kind.CHECKPOINT and in_hook
        # A handler of the user's that waits for its own queue or thread is not held up by what it writes to.
        is_of_logging = is_in(libraries.PYTHON_LOGGING, inside[depth : depth + 1])
        is_around = is_around or (is_of_logging and has_user and user_waits)
        if landmark and not (landmark.weak and has_user) and not is_around:
            return landmark, inside[:depth]
        has_user = has_user or inside[depth].user
    return None, inside


def _landmark(stack: tuple[Frame, ...], depth: int) -> Landmark | None:
    """What a frame shows about the frames below it; None if nothing, as for most of the user's own code."""
    frame = stack[depth]
    if not frame.user:
        return _known_landmark(frame.file, frame.function, frame.mark)
    is_hook = libraries.HOOKS_OF_LOGGERS.has(frame.file, frame.function)
    return _LOGGER if is_hook or frame.mark == Mark.USER_LOGGER or _is_finalize(stack, depth) else None


def _is_finalize(stack: tuple[Frame, ...], depth: int) -> bool:
    """Whether the end of the Trainer's call has called this function of the user's on a logger."""
    frame, outside = stack[depth], stack[:depth]
    callers = (one for one in reversed(outside) if not libraries.RANK_ZERO_ONLY.has(one.file, one.function))
    caller = next(callers, None)
    is_called = caller is not None and libraries.END_OF_CALL.has(caller.file, caller.function)
    return is_called and libraries.FINALIZE.has(frame.file, frame.function)


@lru_cache(maxsize=4096)
def _known_landmark(file: str, function: str, mark: str) -> Landmark | None:
    if libraries.is_top_level(function):
        # Importing a file that has collectives calls none.
        return None
    by_code = (landmark for code, landmark in _BY_CODE if code.has(file, function))
    landmark = _BY_MARK.get(mark) if mark else next(by_code, None)
    return replace(landmark, call=landmark.call or function) if landmark is not None else None


def condition_around(stack: tuple[Frame, ...]) -> tuple[str, Frame | None]:
    """The condition on the rank under which this stack's work is done, and its frame; empty and None if none is."""
    return condition_in(innermost_landmark(inside_trainer(stack))[1])


def condition_in(outer: tuple[Frame, ...]) -> tuple[str, Frame | None]:
    """The innermost condition on the rank in the frames around some work, and its frame; empty and None if none is.

    A decorator counts only on the user's code: Lightning's loggers have decorators of their own.
    """
    for frame in reversed(outer):
        if frame.user and frame.rank_condition:
            return frame.rank_condition, frame
    for index in range(len(outer) - 1, 0, -1):
        if RANK_ZERO_ONLY.has(outer[index - 1].file, outer[index - 1].function) and outer[index].user:
            return "@rank_zero_only", outer[index]
    return "", None


def is_in_wait(stack: tuple[Frame, ...]) -> bool:
    """Whether this stack waits for other ranks, below the user's deepest line."""
    landmark, outer = innermost_landmark(stack)
    is_wait = landmark is not None and not landmark.weak and landmark.kind in (Kind.COLLECTIVE, Kind.STORE)
    return is_wait and len(outer) > last_user(stack)


def is_landmark(frame: Frame) -> bool:
    """Whether a frame is known code that shows what everything below it is about."""
    return _landmark((frame,), 0) is not None


def is_save(stack: tuple[Frame, ...]) -> bool:
    """Whether a frame of Lightning's or torch's in this stack saves a checkpoint, and does not only decide on one."""
    saving = (frame for frame in stack if not libraries.BEFORE_SAVING.has(frame.file, frame.function))
    landmarks = (_landmark((frame,), 0) for frame in saving)
    return any(landmark is not None and landmark.kind is Kind.CHECKPOINT for landmark in landmarks)
