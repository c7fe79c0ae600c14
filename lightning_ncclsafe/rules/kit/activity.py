"""What a rank's main thread is doing, according to its stack, its Lightning actions and its outstanding collectives."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.libraries import RANK_ZERO_ONLY, Code
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import (
    VOTE_GROUPS,
    Action,
    AwaitedThread,
    Branch,
    Collective,
    Decides,
    Frame,
    NotRecorded,
    Phase,
    Progress,
    RankFacts,
)

AGREEMENT = "agreement:"
"""Prefix of the name of an action in which a rank presents its loaders; the hook that returned them follows."""

PAUSE = "pause:"
"""Prefix of the name of an action that is a pause a rank has announced; the reason follows."""

# A main thread that runs, or waits for a core, for this share of the time does not wait for others.
_COMPUTES = 0.2
_WRAPPERS = ("run_training_epoch", "run_training_batch")


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


# What a thread may be in to be waited for by the user's code: a save, a logger, or the wait for other ranks.
_KINDS_OF_THREADS = (Kind.CHECKPOINT, Kind.LOGGER, Kind.COLLECTIVE, Kind.STORE)


@dataclass(frozen=True, slots=True)
class _Landmark:
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


_COLLECTIVE, _STORE = _Landmark(Kind.COLLECTIVE), _Landmark(Kind.STORE)
_LOADER, _LOGGER, _CHECKPOINT = _Landmark(Kind.LOADER), _Landmark(Kind.LOGGER), _Landmark(Kind.CHECKPOINT)

# The first match decides, so exceptions come before the general entry of their file.
_BY_CODE = (
    (libraries.INFINITE_BARRIER, _Landmark(Kind.STORE, exempt=True)),
    (libraries.OBJECT_PICKLING, _Landmark(Kind.USER)),
    (libraries.GROUP_CREATION, _STORE),
    (libraries.RENDEZVOUS, _STORE),
    (libraries.COLLECTIVES, _COLLECTIVE),
    (libraries.SAVING_SHARDED, _CHECKPOINT),
    (libraries.BACKWARD, _Landmark(Kind.COLLECTIVE, call="the backward pass", weak=True)),
    (libraries.DDP, _Landmark(Kind.COLLECTIVE, weak=True)),
    (libraries.SHARDING, _Landmark(Kind.COLLECTIVE, weak=True)),
    (libraries.DATALOADER, _LOADER),
    (libraries.FETCH, _LOADER),
    (libraries.FETCHERS, _LOADER),
    (libraries.LOGGING, _LOGGER),
    (libraries.WANDB_AGENT, None),
    (libraries.LOG_WRITERS, _LOGGER),
    (libraries.PYTHON_LOGGING, _LOGGER),
    (libraries.TEXT_OF_RECORDS, _Landmark(Kind.USER)),
    (libraries.SAVE, _CHECKPOINT),
    (libraries.SAVING, _CHECKPOINT),
)
_BY_MARK = {
    Mark.STORE.value: _Landmark(Kind.STORE, call="an agreement of all ranks"),
    Mark.VOTE.value: _Landmark(Kind.COLLECTIVE, call="the vote on the next batch"),
    Mark.LOGGER.value: _LOGGER,
}

# Reading a device's result in Python waits for everything queued on the device, including collectives.
_SYNC = re.compile(r"\.(?:item|cpu|tolist|numpy)\(|synchronize\(|\.to\(|\bfloat\(|\bint\(|\bbool\(")


def _landmark(stack: tuple[Frame, ...], depth: int) -> _Landmark | None:
    """What a frame shows about the frames below it; None if nothing, as for most of the user's own code."""
    frame = stack[depth]
    if not frame.user:
        return _known_landmark(frame.file, frame.function, frame.mark)
    is_hook = libraries.HOOKS_OF_LOGGERS.has(frame.file, frame.function)
    return _LOGGER if is_hook or _is_finalize(stack, depth) else None


def _is_finalize(stack: tuple[Frame, ...], depth: int) -> bool:
    """Whether the end of the Trainer's call has called this function of the user's on a logger."""
    frame, outside = stack[depth], stack[:depth]
    callers = (one for one in reversed(outside) if not libraries.RANK_ZERO_ONLY.has(one.file, one.function))
    caller = next(callers, None)
    is_called = caller is not None and libraries.END_OF_CALL.has(caller.file, caller.function)
    return is_called and libraries.FINALIZE.has(frame.file, frame.function)


@lru_cache(maxsize=4096)
def _known_landmark(file: str, function: str, mark: str) -> _Landmark | None:
    if libraries.is_top_level(function):
        # Importing a file that has collectives calls none.
        return None
    by_code = (landmark for code, landmark in _BY_CODE if code.has(file, function))
    landmark = _BY_MARK.get(mark) if mark else next(by_code, None)
    return replace(landmark, call=landmark.call or function) if landmark is not None else None


def looks_like_device_sync(frame: Frame) -> bool:
    """Whether the line reads a value back from a device, or synchronises with one."""
    return _SYNC.search(frame.code) is not None


def starts_trainer(frame: Frame) -> bool:
    """Whether this frame is where a Trainer starts to run."""
    return libraries.TRAINER_RUN.has(frame.file, frame.function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one rank is doing.

    Attributes:
        kind: What its main thread is in.
        frame: Deepest frame of the user's own code; None if there is none.
        place: The most specific frame: the user's below the Trainer, else the one that ``kind`` was derived from.
        hook: The innermost Lightning action in words, ``"Net.on_train_epoch_end"``; empty between hooks.
        hook_for_s: Seconds since that action began; since the last progress where there is none.
        collective: The oldest outstanding collective (point-to-point operations aside); None if there is none.
        call: The function or barrier in which it waits, ``"broadcast"``, ``"barrier 'post_setup'"``; may be empty.
        on_device: Whether a collective is outstanding on a device while the main thread is free to do something else.
        exempt: Whether Lightning itself lets this rank wait without limit (``prepare_data``).
        waits_alone: Whether the user's code waits, but not for other ranks: for a queue, a lock or a pool, or its main
            thread hardly runs.
        waits_for_holder: Whether it waits for a file lock that another rank of the job holds.
        rank_condition: The condition on the rank under which the work is done, with its line; empty if there is none.
        condition_frame: The frame that contains this condition.
    """

    kind: Kind
    frame: Frame | None = None
    place: Frame | None = None
    hook: str = ""
    hook_for_s: float = 0.0
    collective: Collective | None = None
    call: str = ""
    on_device: bool = False
    exempt: bool = False
    waits_alone: bool = False
    waits_for_holder: bool = False
    rank_condition: str = ""
    condition_frame: Frame | None = None

    @property
    def waits_for_peers(self) -> bool:
        """Whether this rank cannot continue until other ranks do something."""
        is_in_wait = self.kind in (Kind.COLLECTIVE, Kind.STORE) or self.waits_for_holder
        return is_in_wait or (self.on_device and self.kind is not Kind.FINISHED)

    @property
    def waits_for_data(self) -> bool:
        """Whether this rank waits for, or works in, its dataloader."""
        return self.kind is Kind.LOADER


def activity(facts: RankFacts) -> Activity:
    """What this rank is doing."""
    inside = inside_trainer(facts.stack)
    landmark, outer = _innermost_landmark(inside)
    collective = outstanding_collective(facts)
    kind, call = _kind(facts, landmark, collective)
    kind, call = _of_thread(facts) if kind is Kind.USER else (kind, call)
    action = innermost_action(facts.progress)
    condition, frame = _rank_condition(outer)
    return Activity(
        kind=kind,
        frame=deepest_user_frame(facts.stack),
        place=deepest_user_frame(inside) or (inside[len(outer)] if landmark else None),
        hook=hook_words(action.name) if action else "",
        hook_for_s=action.for_s if action else facts.progress.idle_s,
        collective=collective,
        call=call,
        on_device=collective is not None and collective.backend.startswith("nccl"),
        exempt=landmark is not None and landmark.exempt,
        waits_alone=kind is Kind.USER
        and (is_in(libraries.WAITS_FOR_OTHERS, below_user(inside)) or _is_known_to_rest(facts)),
        rank_condition=condition,
        condition_frame=frame,
    )


def innermost_action(progress: Progress) -> Action | None:
    """What Lightning is doing: a hook, a data fetch, a save; None between hooks."""
    return next((one for one in reversed(progress.actions) if one.name not in _WRAPPERS), None)


def presented_stage(facts: RankFacts) -> str:
    """The stage whose loaders a rank presents; empty if it presents none."""
    names = (action.name for action in facts.progress.actions)
    return next((name.removeprefix(AGREEMENT) for name in names if name.startswith(AGREEMENT)), "")


def open_collectives(facts: RankFacts) -> Iterator[Collective]:
    """The collectives that this rank has called and that have not completed, the oldest first; no sends or receives."""
    return (entry for entry in facts.collectives if not entry.completed and not entry.is_p2p)


def outstanding_collective(facts: RankFacts) -> Collective | None:
    """The oldest collective that this rank has called and that has not completed.

    A vote on the next batch may be in flight while the rank does something else; it counts only if the rank waits for
    it.
    """
    votes = {group.name for group in facts.groups if group.description in VOTE_GROUPS}
    in_vote = any(frame.mark == Mark.VOTE for frame in facts.stack)
    return next((entry for entry in open_collectives(facts) if (entry.group in votes) is in_vote), None)


def outstanding_p2p(facts: RankFacts) -> Collective | None:
    """The oldest send or receive that this rank has called and that has not completed; gloo records none."""
    return next(filter(is_open_p2p, facts.collectives), None)


def is_open_p2p(call: Collective) -> bool:
    """Whether it is a send or receive that has not completed."""
    return call.is_p2p and not call.completed


def deepest_user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in reversed(stack) if frame.user), None)


def first_user_frame(stacks: Iterable[tuple[Frame, ...]]) -> Frame | None:
    """The innermost frame of the user's own code on the first of these stacks that has one."""
    return next((frame for stack in stacks if (frame := deepest_user_frame(stack)) is not None), None)


def below_user(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames below the user's innermost line."""
    return stack[_last_user(stack) + 1 :]


def _last_user(stack: tuple[Frame, ...]) -> int:
    return max((depth for depth, frame in enumerate(stack) if frame.user), default=-1)


def awaited_thread(facts: RankFacts) -> AwaitedThread | None:
    """The thread that a rank's main thread waits for, if its stack shows that it still waits; None if it does not."""
    still_waits = is_in(libraries.WAITS_FOR_OTHERS, below_user(facts.stack))
    thread = facts.awaited_thread if still_waits else None
    # A report that is read again may lack the thread's stack.
    return thread if thread is not None and thread.stack else None


def condition_around(stack: tuple[Frame, ...]) -> tuple[str, Frame | None]:
    """The condition on the rank under which this stack's work is done, and its frame; empty and None if none is."""
    return _rank_condition(_innermost_landmark(inside_trainer(stack))[1])


def hook_words(name: str) -> str:
    """The readable name of an action: ``"[Callback]main.<locals>.Early{'mode': 'min'}.setup"`` is ``"Early.setup"``."""
    if name.startswith("barrier:"):
        barrier = name.removeprefix("barrier:")
        return f"barrier {barrier!r}" if barrier else "a barrier"
    if name.startswith(AGREEMENT):
        return f"the comparison of the ranks' {name.removeprefix(AGREEMENT)}"
    if name.startswith(PAUSE):
        return f"a pause that was announced ({name.removeprefix(PAUSE) or 'no reason given'})"
    owner, _, rest = name.partition("]")
    plain = rest.lstrip(".") if owner.startswith("[") and rest else name
    before, brace, after = plain.partition("{")
    plain = before + after[after.rfind("}") + 1 :] if brace else plain
    plain = plain.rpartition("<locals>.")[2]
    # "SafeDDP.training_step" is the user's training_step, called through the strategy.
    return plain.rpartition(".")[2] if owner == "[Strategy" else plain


def _innermost_landmark(inside: tuple[Frame, ...]) -> tuple[_Landmark | None, tuple[Frame, ...]]:
    """The deepest landmark, and the frames around it; None and all frames if there is none."""
    user_waits = is_in(libraries.WAITS_FOR_OTHERS, below_user(inside))
    has_user = in_hook = False
    for depth in range(len(inside) - 1, -1, -1):
        landmark = _landmark(inside, depth)
        # A user's hook that is called while a checkpoint is assembled is not part of writing it.
        in_hook = in_hook or (has_user and is_in(libraries.PUTTING_CHECKPOINT_TOGETHER, inside[depth : depth + 1]))
        is_around = landmark is not None and landmark.kind is Kind.CHECKPOINT and in_hook
        # Nor is a handler of the user's that waits for its own queue or thread held up by what it writes to.
        is_of_logging = is_in(libraries.PYTHON_LOGGING, inside[depth : depth + 1])
        is_around = is_around or (is_of_logging and has_user and user_waits)
        if landmark and not (landmark.weak and has_user) and not is_around:
            return landmark, inside[:depth]
        has_user = has_user or inside[depth].user
    return None, inside


def trainer_start(stack: tuple[Frame, ...]) -> int:
    """Index of the frame in which the Trainer starts to run; 0 if there is none.

    The frames outside of it (a sweep agent, ``if rank != -1: main()``) show nothing about what the rank is doing.
    """
    return next((index for index, frame in enumerate(stack) if starts_trainer(frame)), 0)


def inside_trainer(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames from the one in which the Trainer starts to run; all of them if there is none."""
    return stack[trainer_start(stack) :]


def depth_passed(own: tuple[Frame, ...], other: tuple[Frame, ...]) -> int | None:
    """Depth of the user's function in which one stack is further down than another, reached by the same calls; or None.

    The first rank is past the line that the other one is at.
    """
    for depth, (one, two) in enumerate(zip(own, other, strict=False)):
        if (one.file, one.function) != (two.file, two.function):
            return None
        if one.line != two.line:
            return depth if one.user and one.line > two.line else None
    return None


def is_before(other: tuple[Frame, ...], own: tuple[Frame, ...]) -> bool:
    """Whether one stack has yet to reach the line at which another is in the same function, and no loop leads back."""
    depth = depth_passed(own, other)
    return depth is not None and not any(
        loop.line <= other[depth].line <= loop.until for loop in _loops_around(own[depth])
    )


def loop_left(own: tuple[Frame, ...], other: tuple[Frame, ...]) -> Frame | None:
    """The outermost loop, at its first line, that one stack is past and another is in; None if there is none."""
    depth = depth_passed(own, other)
    if depth is None:
        return None
    common = _loops_around(own[depth])
    for frame in other[depth:]:
        if frame.user and (loops := [loop for loop in _loops_around(frame) if loop not in common]):
            code = loops[-1].test.rpartition("  (line ")[0]
            return replace(frame, line=loops[-1].line, code=code)
    return None


def _loops_around(frame: Frame) -> list[Branch]:
    """The loops around a frame's line whose number of passes may differ between ranks, from outside in."""
    return [branch for branch in frame.branches if branch.on is Decides.PASSES and not branch.jump]


def has_no_trainer(facts: RankFacts) -> bool:
    """Whether a rank has no Trainer: only possible for a program that is inspected from outside."""
    return facts.inspection is not None and facts.progress.phase is Phase.UNKNOWN


def _kind(facts: RankFacts, landmark: _Landmark | None, collective: Collective | None) -> tuple[Kind, str]:
    """What the main thread is in, and in which call it waits."""
    if facts.progress.phase is Phase.FINISHED:
        return Kind.FINISHED, ""
    action = facts.progress.actions[-1].name if facts.progress.actions else ""
    if landmark is not None and not (landmark.weak and collective is None and not _may_wait_unrecorded(facts)):
        call = hook_words(action) if action.startswith(("barrier:", AGREEMENT)) else landmark.call
        # Saving predictions is not saving a checkpoint.
        is_prediction = landmark.kind is Kind.CHECKPOINT and facts.progress.phase is Phase.PREDICT
        return (Kind.USER if is_prediction else landmark.kind), call
    return _kind_without_landmark(facts, action, collective)


def _kind_without_landmark(facts: RankFacts, action: str, collective: Collective | None) -> tuple[Kind, str]:
    if action.startswith("barrier:") and not facts.stack:
        return Kind.COLLECTIVE, hook_words(action)
    if action == "init_process_group":
        return Kind.STORE, action
    call = _call_without_landmark(facts, collective)
    if call is not None:
        return Kind.COLLECTIVE, call
    if action.endswith("_dataloader_next"):
        return Kind.LOADER, ""
    if action == "save_checkpoint":
        return Kind.CHECKPOINT, ""
    return (Kind.USER if deepest_user_frame(inside_trainer(facts.stack)) else Kind.LIGHTNING), ""


def _call_without_landmark(facts: RankFacts, collective: Collective | None) -> str | None:
    """What the main thread waits for although no known frame shows it; None if it does not seem to wait."""
    if collective is not None and _blocked_by(collective, facts.stack):
        return collective.op
    p2p = outstanding_p2p(facts)
    # NCCL's send and recv return at once.
    if p2p is not None and facts.stack and looks_like_device_sync(facts.stack[-1]):
        return p2p.op.partition(" ")[0]
    if collective is None and facts.stack and _waits_in_c(facts):
        return "wait"
    return "what is queued on a GPU" if waits_for_silent_device(facts) else None


def _of_thread(facts: RankFacts) -> tuple[Kind, str]:
    """The same of the user's code on the main thread, which is what the thread is in that it waits for."""
    thread = awaited_thread(facts)
    landmark, _ = _innermost_landmark(thread.stack) if thread is not None else (None, ())
    if landmark is None or landmark.kind not in _KINDS_OF_THREADS:
        return Kind.USER, ""
    is_prediction = landmark.kind is Kind.CHECKPOINT and facts.progress.phase is Phase.PREDICT
    return (Kind.USER, "") if landmark.weak or is_prediction else (landmark.kind, landmark.call)


def _waits_in_c(facts: RankFacts) -> bool:
    """Whether it is in a wait() of C++ code: for a collective that no recorder has, or for a send or receive.

    Gloo records neither sends and receives nor their waits. A wait() of Python's library has further frames below.
    """
    deepest = facts.stack[-1]
    if ".wait(" not in deepest.code:
        return False
    return _may_wait_unrecorded(facts) or (deepest.user and bool(facts.groups) and hardly_runs(facts))


def _may_wait_unrecorded(facts: RankFacts) -> bool:
    """Whether it may wait in a collective that no recorder has: it hardly runs, or waits for its device."""
    return is_unrecorded(facts) and (hardly_runs(facts) or waits_for_silent_device(facts))


def is_unrecorded(facts: RankFacts) -> bool:
    """Whether no recorder shows what a rank has called in some group."""
    return any(group.why is not NotRecorded.LOST for group in facts.unrecorded)


def waits_for_silent_device(facts: RankFacts) -> bool:
    """Whether the main thread is in code of torch's while CUDA's driver does not answer: it waits for its device.

    Its place is not that of the collective which its device is in: a rank that reads no results runs ahead of its
    device, even to the end of the training, where memory is freed. CUDA waits by asking over and over, so it computes.
    """
    if not facts.stack or all(group.why is not NotRecorded.DRIVER_SILENT for group in facts.unrecorded):
        return False
    deepest = facts.stack[-1]
    return libraries.ALL_OF_TORCH.has(deepest.file, deepest.function) or looks_like_device_sync(deepest)


def hardly_runs(facts: RankFacts) -> bool:
    """Whether the main thread has hardly run of late, as far as that is known."""
    thread = facts.machine.main_thread
    return thread is None or thread.ran_s is None or _is_known_to_rest(facts)


def _is_known_to_rest(facts: RankFacts) -> bool:
    """Whether the main thread is known to have hardly run, or waited for a core, since this rank made progress."""
    thread = facts.machine.main_thread
    if thread is None or thread.ran_s is None:
        return False
    return thread.ran_s + (thread.queued_s or 0.0) < _COMPUTES * thread.over_s


def _blocked_by(collective: Collective, stack: tuple[Frame, ...]) -> bool:
    """Whether the main thread is blocked by this collective: on a device where it reads a result, on gloo in wait()."""
    if not stack or ".wait(" in stack[-1].code:
        return True
    return collective.backend.startswith("nccl") and (looks_like_device_sync(stack[-1]) or not stack[-1].user)


def _rank_condition(outer: tuple[Frame, ...]) -> tuple[str, Frame | None]:
    """The innermost condition on the rank around some work, and its frame.

    A decorator counts only on the user's code: Lightning's loggers have decorators of their own.
    """
    for frame in reversed(outer):
        if frame.user and frame.rank_condition:
            return frame.rank_condition, frame
    for index in range(len(outer) - 1, 0, -1):
        if RANK_ZERO_ONLY.has(outer[index - 1].file, outer[index - 1].function) and outer[index].user:
            return "@rank_zero_only", outer[index]
    return "", None


def is_in(code: Code, stack: Iterable[Frame]) -> bool:
    """Whether any of these frames is in this code."""
    return any(code.has(frame.file, frame.function) for frame in stack)


def is_in_wait(stack: tuple[Frame, ...]) -> bool:
    """Whether this stack waits for other ranks, below the user's deepest line."""
    landmark, outer = _innermost_landmark(stack)
    is_wait = landmark is not None and not landmark.weak and landmark.kind in (Kind.COLLECTIVE, Kind.STORE)
    return is_wait and len(outer) > _last_user(stack)


def is_landmark(frame: Frame) -> bool:
    """Whether a frame is known code that shows what everything below it is about."""
    return _landmark((frame,), 0) is not None


def is_save(stack: tuple[Frame, ...]) -> bool:
    """Whether a frame of Lightning's or torch's in this stack saves a checkpoint, and does not only decide on one."""
    saving = (frame for frame in stack if not libraries.BEFORE_SAVING.has(frame.file, frame.function))
    landmarks = (_landmark((frame,), 0) for frame in saving)
    return any(landmark is not None and landmark.kind is Kind.CHECKPOINT for landmark in landmarks)
