"""What a rank's main thread is doing, read from its stack, its Lightning actions and its outstanding collectives."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.libraries import RANK_ZERO_ONLY, Code
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import VOTE_GROUPS, Action, Collective, Frame, NotRecorded, Phase, RankFacts

AGREEMENT = "agreement:"
"""What the name of an action begins with in which a rank presents its loaders; the hook that gave them follows."""

PAUSE = "pause:"
"""What the name of an action begins with for which a rank has announced that it will stand still; why follows."""

# Share of the time in which a main thread runs, or waits for a core, that does not wait for others.
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


@dataclass(frozen=True, slots=True)
class _Landmark:
    """What a frame says about everything below it.

    Attributes:
        kind: What a main thread is in there.
        call: The function, or for code of ours what it is for.
        weak: Whether it counts only with a collective outstanding and no user code below it, as its C++ code both
            computes and waits.
        exempt: Whether Lightning waits there without limit on purpose.
    """

    kind: Kind
    call: str = ""
    weak: bool = False
    exempt: bool = False


_COLLECTIVE, _STORE = _Landmark(Kind.COLLECTIVE), _Landmark(Kind.STORE)
_LOADER, _LOGGER, _CHECKPOINT = _Landmark(Kind.LOADER), _Landmark(Kind.LOGGER), _Landmark(Kind.CHECKPOINT)

# The first that fits decides, so exceptions stand before their file's general line.
_BY_CODE = (
    (libraries.INFINITE_BARRIER, _Landmark(Kind.STORE, exempt=True)),
    (libraries.OBJECT_PICKLING, _Landmark(Kind.USER)),
    (libraries.GROUP_CREATION, _STORE),
    (libraries.RENDEZVOUS, _STORE),
    (libraries.COLLECTIVES, _COLLECTIVE),
    (libraries.SAVING_SHARDED, _CHECKPOINT),
    (libraries.BACKWARD, _Landmark(Kind.COLLECTIVE, weak=True)),
    (libraries.DDP, _Landmark(Kind.COLLECTIVE, weak=True)),
    (libraries.SHARDING, _Landmark(Kind.COLLECTIVE, weak=True)),
    (libraries.DATALOADER, _LOADER),
    (libraries.FETCH, _LOADER),
    (libraries.FETCHERS, _LOADER),
    (libraries.LOGGING, _LOGGER),
    (libraries.WANDB_AGENT, None),
    (libraries.LOG_WRITERS, _LOGGER),
    (libraries.SAVE, _CHECKPOINT),
    (libraries.SAVING, _CHECKPOINT),
)
_BY_MARK = {
    Mark.STORE.value: _Landmark(Kind.STORE, call="an agreement of all ranks"),
    Mark.VOTE.value: _Landmark(Kind.COLLECTIVE, call="the vote on the next batch"),
    Mark.LOGGER.value: _LOGGER,
}

# Reading a device's result in Python waits for everything queued on it, collectives included.
_SYNC = re.compile(r"\.(?:item|cpu|tolist|numpy)\(|synchronize\(|\.to\(|\bfloat\(|\bint\(|\bbool\(")


def _landmark(frame: Frame) -> _Landmark | None:
    """What this frame says about the frames below it; None for one that says nothing, as most of the user's own."""
    if frame.user:
        return _LOGGER if libraries.HOOKS_OF_LOGGERS.has(frame.file, frame.function) else None
    return _known_landmark(frame.file, frame.function, frame.mark)


@lru_cache(maxsize=4096)
def _known_landmark(file: str, function: str, mark: str) -> _Landmark | None:
    if libraries.is_top_level(function):
        # Who imports what has collectives is in none.
        return None
    by_code = (landmark for code, landmark in _BY_CODE if code.has(file, function))
    found = _BY_MARK.get(mark) if mark else next(by_code, None)
    return replace(found, call=found.call or function) if found is not None else None


def looks_like_device_sync(frame: Frame) -> bool:
    """Whether the line reads a value back from a device, or synchronises with one."""
    return _SYNC.search(frame.code) is not None


def starts_trainer(frame: Frame) -> bool:
    """Whether the Trainer starts to run in this frame."""
    return libraries.TRAINER_RUN.has(frame.file, frame.function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one rank is doing.

    Attributes:
        kind: What its main thread is in.
        frame: Deepest frame of the user's own code; None if there is none.
        place: The frame that tells most: the user's below the Trainer, else the one that ``kind`` was read from.
        hook: The innermost Lightning action in words, ``"Net.on_train_epoch_end"``; empty between hooks.
        hook_for_s: Seconds since that action began; since the last progress where there is none.
        collective: The oldest outstanding collective (point-to-point operations aside); None if there is none.
        call: The function or barrier in which it waits, ``"broadcast"``, ``"barrier 'post_setup'"``; may be empty.
        on_device: Whether a collective is outstanding on a device while the main thread is free to do something else.
        exempt: Whether Lightning itself lets this rank wait without limit (``prepare_data``).
        waits_alone: Whether the user's code waits by itself: on a queue, a lock, a pool, or as its main thread, which
            hardly runs, shows.
        waits_for_holder: Whether it waits for a file lock that another rank of the job holds.
        rank_condition: Condition on the rank under which the work is done, in words; empty if there is none.
        condition_frame: The frame in which that condition stands.
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
        """Whether this rank cannot go on before other ranks do something."""
        is_in_wait = self.kind in (Kind.COLLECTIVE, Kind.STORE) or self.waits_for_holder
        return is_in_wait or (self.on_device and self.kind is not Kind.FINISHED)

    @property
    def waits_for_data(self) -> bool:
        """Whether this rank waits for, or works in, its dataloader."""
        return self.kind is Kind.LOADER


def activity(facts: RankFacts) -> Activity:
    """What this rank is doing."""
    inside = facts.stack[trainer_start(facts.stack) :]
    mark, outer = _innermost_landmark(inside)
    collective = outstanding_collective(facts)
    kind, call = _kind(facts, mark, collective)
    action = _hook_action(facts.progress.actions)
    condition, frame = _rank_condition(outer)
    return Activity(
        kind=kind,
        frame=deepest_user_frame(facts.stack),
        place=deepest_user_frame(inside) or (inside[len(outer)] if mark else None),
        hook=hook_words(action.name) if action else "",
        hook_for_s=action.for_s if action else facts.progress.idle_s,
        collective=collective,
        call=call,
        on_device=collective is not None and collective.backend.startswith("nccl"),
        exempt=mark is not None and mark.exempt,
        waits_alone=kind is Kind.USER and (is_in(libraries.WAITS_FOR_OTHERS, _below_user(inside)) or _rests(facts)),
        rank_condition=condition,
        condition_frame=frame,
    )


def outstanding_collective(facts: RankFacts) -> Collective | None:
    """The oldest collective that this rank has called and that has not completed.

    A vote on the next batch may be on its way while the rank does something else; where the rank waits for it, it
    counts.
    """
    votes = {group.name for group in facts.groups if group.description in VOTE_GROUPS}
    in_vote = any(frame.mark == Mark.VOTE for frame in facts.stack)
    outstanding = (entry for entry in facts.collectives if not entry.completed and not entry.is_p2p)
    return next((entry for entry in outstanding if (entry.group in votes) is in_vote), None)


def deepest_user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in reversed(stack) if frame.user), None)


def _below_user(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """What the user's innermost line has called."""
    last = max((depth for depth, frame in enumerate(stack) if frame.user), default=-1)
    return stack[last + 1 :]


def condition_around(stack: tuple[Frame, ...]) -> tuple[str, Frame | None]:
    """The condition on the rank under which this stack's work is done, and its frame; empty, and None, without one."""
    return _rank_condition(_innermost_landmark(stack[trainer_start(stack) :])[1])


def hook_words(name: str) -> str:
    """An action's name for people: ``"[Callback]Early{'mode': 'min'}.setup"`` becomes ``"Early.setup"``."""
    if name.startswith("barrier:"):
        return f"barrier {name.removeprefix('barrier:')!r}"
    if name.startswith(AGREEMENT):
        return f"the comparison of the ranks' {name.removeprefix(AGREEMENT)}"
    if name.startswith(PAUSE):
        return f"a pause that was announced ({name.removeprefix(PAUSE) or 'no reason given'})"
    owner, _, rest = name.partition("]")
    plain = rest.lstrip(".") if owner.startswith("[") and rest else name
    before, brace, after = plain.partition("{")
    plain = before + after[after.rfind("}") + 1 :] if brace else plain
    # "SafeDDP.training_step" is the user's training_step, called through the strategy.
    return plain.rpartition(".")[2] if owner == "[Strategy" else plain


def _hook_action(actions: tuple[Action, ...]) -> Action | None:
    return next((action for action in reversed(actions) if action.name not in _WRAPPERS), None)


def _innermost_landmark(inside: tuple[Frame, ...]) -> tuple[_Landmark | None, tuple[Frame, ...]]:
    """What the deepest telling frame says, and the frames around that frame."""
    below_user = in_hook = False
    for depth in range(len(inside) - 1, -1, -1):
        found = _landmark(inside[depth])
        # What a hook of the user's does while a checkpoint is put together is none of its writing.
        in_hook = in_hook or (below_user and is_in(libraries.PUTTING_CHECKPOINT_TOGETHER, inside[depth : depth + 1]))
        is_around = found is not None and found.kind is Kind.CHECKPOINT and in_hook
        if found and not (found.weak and below_user) and not is_around:
            return found, inside[:depth]
        below_user = below_user or inside[depth].user
    return None, inside


def trainer_start(stack: tuple[Frame, ...]) -> int:
    """What lies outside the Trainer (a sweep agent, ``if rank != -1: main()``) says nothing about what goes on."""
    return next((index for index, frame in enumerate(stack) if starts_trainer(frame)), 0)


def _kind(facts: RankFacts, mark: _Landmark | None, collective: Collective | None) -> tuple[Kind, str]:
    if facts.progress.phase is Phase.FINISHED:
        return Kind.FINISHED, ""
    action = facts.progress.actions[-1].name if facts.progress.actions else ""
    if mark is not None and not (mark.weak and collective is None and not _may_wait_unseen(facts)):
        named = hook_words(action) if action.startswith(("barrier:", AGREEMENT)) else mark.call
        # What is saved of a prediction is no checkpoint.
        is_result = mark.kind is Kind.CHECKPOINT and facts.progress.phase is Phase.PREDICT
        return (Kind.USER if is_result else mark.kind), named
    return _kind_without_landmark(facts, action, collective)


def _kind_without_landmark(facts: RankFacts, action: str, collective: Collective | None) -> tuple[Kind, str]:
    if action.startswith("barrier:") and not facts.stack:
        return Kind.COLLECTIVE, hook_words(action)
    if action == "init_process_group":
        return Kind.STORE, action
    if collective is not None and _blocked_by(collective, facts.stack):
        return Kind.COLLECTIVE, collective.op
    if collective is None and facts.stack and _waits_in_c(facts):
        return Kind.COLLECTIVE, "wait"
    if action.endswith("_dataloader_next"):
        return Kind.LOADER, ""
    if action == "save_checkpoint":
        return Kind.CHECKPOINT, ""
    inside = facts.stack[trainer_start(facts.stack) :]
    return (Kind.USER if deepest_user_frame(inside) else Kind.LIGHTNING), ""


def _waits_in_c(facts: RankFacts) -> bool:
    """Whether it is in a wait() of C++ code: that for a collective of which no recorder tells, or a send or receive.

    Gloo records neither those nor their waits. A wait of Python's own has frames of its library below.
    """
    deepest = facts.stack[-1]
    if ".wait(" not in deepest.code:
        return False
    return _may_wait_unseen(facts) or (deepest.user and bool(facts.groups) and hardly_runs(facts))


def _may_wait_unseen(facts: RankFacts) -> bool:
    """Whether it may wait in a collective of which no recorder tells: the main thread then hardly runs."""
    return any(group.why is not NotRecorded.LOST for group in facts.unrecorded) and hardly_runs(facts)


def hardly_runs(facts: RankFacts) -> bool:
    """Whether the main thread has hardly run of late, as far as that is known."""
    thread = facts.machine.main_thread
    return thread is None or thread.ran_s is None or _rests(facts)


def _rests(facts: RankFacts) -> bool:
    """Whether the main thread is known to have hardly run, or waited for a core, since this rank made progress."""
    thread = facts.machine.main_thread
    if thread is None or thread.ran_s is None:
        return False
    return thread.ran_s + (thread.queued_s or 0.0) < _COMPUTES * thread.over_s


def _blocked_by(collective: Collective, stack: tuple[Frame, ...]) -> bool:
    """Device collectives block the main thread wherever it reads a result; those of gloo only where it waits."""
    if not stack or ".wait(" in stack[-1].code:
        return True
    return collective.backend.startswith("nccl") and (looks_like_device_sync(stack[-1]) or not stack[-1].user)


def _rank_condition(outer: tuple[Frame, ...]) -> tuple[str, Frame | None]:
    """Only conditions around the work count, and decorators on the user's code: Lightning's loggers have their own."""
    for frame in reversed(outer):
        if frame.user and frame.rank_condition:
            return frame.rank_condition, frame
    for index in range(len(outer) - 1, 0, -1):
        if RANK_ZERO_ONLY.has(outer[index - 1].file, outer[index - 1].function) and outer[index].user:
            return "@rank_zero_only", outer[index]
    return "", None


def is_in(code: Code, stack: Iterable[Frame]) -> bool:
    """Whether any of these frames is in some code."""
    return any(code.has(frame.file, frame.function) for frame in stack)


def is_in_wait(stack: tuple[Frame, ...]) -> bool:
    """Whether this stack is that of a wait for other ranks, below the user's deepest line."""
    mark, outer = _innermost_landmark(stack)
    last = max((depth for depth, frame in enumerate(stack) if frame.user), default=-1)
    return mark is not None and not mark.weak and mark.kind in (Kind.COLLECTIVE, Kind.STORE) and len(outer) > last


def is_telling(frame: Frame) -> bool:
    """Whether a frame of others' code says what everything below it is about."""
    return _landmark(frame) is not None


def is_save(stack: tuple[Frame, ...]) -> bool:
    """Whether a frame of Lightning's or torch's in this stack saves a checkpoint; to decide about one is no save."""
    marks = (_landmark(frame) for frame in stack if not libraries.BEFORE_SAVING.has(frame.file, frame.function))
    return any(mark is not None and mark.kind is Kind.CHECKPOINT for mark in marks)
