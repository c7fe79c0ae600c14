"""What a rank is doing and waits for, by its stack, Lightning's actions, outstanding calls, device and threads."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_ncclsafe.code import libraries
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import (
    VOTE_GROUPS,
    Action,
    AwaitedThread,
    Collective,
    Frame,
    NotRecorded,
    Phase,
    Progress,
    RankFacts,
)
from lightning_ncclsafe.facts.phase_kinds import stage_fetched
from lightning_ncclsafe.rules.kit.frames import (
    below_user,
    deepest_user_frame,
    inside_trainer,
    is_in,
    looks_like_device_sync,
    outside_compiler,
)
from lightning_ncclsafe.rules.kit.landmarks import Kind, Landmark, condition_in, innermost_landmark

FETCHES = "next("
"""How the words for an action begin in which a loop of Lightning fetches a batch: ``"next(train_dataloader)"``."""

AGREEMENT = "agreement:"
"""Prefix of the name of an action in which a rank presents its loaders; the hook that returned them follows."""

ASLEEP_S = 10.0
"""Threads that have waited for one another for so long will not go on by themselves."""

PAUSE = "pause:"
"""Prefix of the name of an action that is a pause a rank has announced; the reason follows."""

# A main thread that runs, or waits for a core, for this share of the time does not wait for others.
_COMPUTES = 0.2
_WRAPPERS = ("run_training_epoch", "run_training_batch")
# What a thread that the user's code waits for may be in: a save, a logger, or the wait for other ranks.
_KINDS_OF_THREADS = (Kind.CHECKPOINT, Kind.LOGGER, Kind.COLLECTIVE, Kind.STORE)


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
    landmark, outer = innermost_landmark(inside)
    collective = outstanding_collective(facts)
    kind, call = _kind_and_call(facts, landmark, collective)
    action = innermost_action(facts.progress)
    condition, frame = condition_in(outer)
    return Activity(
        kind=kind,
        frame=deepest_user_frame(outside_compiler(facts.stack)),
        place=deepest_user_frame(outside_compiler(inside)) or (inside[len(outer)] if landmark else None),
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


def _kind_and_call(facts: RankFacts, landmark: Landmark | None, collective: Collective | None) -> tuple[Kind, str]:
    """What the main thread is in, and in which call it waits: the first answer that its facts give.

    If the user's code waits for a thread of its own, the main thread is in what that thread is in.
    """
    if facts.progress.phase is Phase.FINISHED:
        return Kind.FINISHED, ""
    kind, call = (
        _in_known_code(facts, landmark, collective)
        or _in_named_wait(facts)
        or _in_unnamed_wait(facts, collective)
        or _in_named_action(facts)
        or (Kind.USER if deepest_user_frame(inside_trainer(facts.stack)) else Kind.LIGHTNING, "")
    )
    return _in_awaited_thread(facts) if kind is Kind.USER else (kind, call)


def _in_known_code(
    facts: RankFacts, landmark: Landmark | None, collective: Collective | None
) -> tuple[Kind, str] | None:
    if landmark is None or (landmark.weak and collective is None and not _may_wait_unrecorded(facts)):
        return None
    action = _action(facts)
    call = hook_words(action) if action.startswith(("barrier:", AGREEMENT)) else landmark.call
    return (Kind.USER, "") if _is_of_prediction(facts, landmark) else (landmark.kind, call)


def _is_of_prediction(facts: RankFacts, landmark: Landmark) -> bool:
    """Whether what looks like saving a checkpoint saves predictions."""
    return landmark.kind is Kind.CHECKPOINT and facts.progress.phase is Phase.PREDICT


def _in_named_wait(facts: RankFacts) -> tuple[Kind, str] | None:
    """The wait that Lightning has named, if no frame shows it."""
    action = _action(facts)
    if action.startswith("barrier:") and not facts.stack:
        return Kind.COLLECTIVE, hook_words(action)
    return (Kind.STORE, action) if action == "init_process_group" else None


def _in_unnamed_wait(facts: RankFacts, collective: Collective | None) -> tuple[Kind, str] | None:
    """The wait for a collective, a peer or the device that neither a known frame nor Lightning shows."""
    if collective is not None and _blocked_by(collective, facts.stack):
        return Kind.COLLECTIVE, collective.op
    p2p = outstanding_p2p(facts)
    # NCCL's send and recv return at once.
    if p2p is not None and facts.stack and looks_like_device_sync(facts.stack[-1]):
        return Kind.COLLECTIVE, p2p.op.partition(" ")[0]
    if collective is None and facts.stack and _waits_in_c(facts):
        return Kind.COLLECTIVE, "wait"
    return (Kind.COLLECTIVE, "what is queued on a GPU") if waits_for_silent_device(facts) else None


def _in_named_action(facts: RankFacts) -> tuple[Kind, str] | None:
    """What Lightning has named that waits for no other rank."""
    action = _action(facts)
    if stage_fetched(action):
        return Kind.LOADER, ""
    return (Kind.CHECKPOINT, "") if action == "save_checkpoint" else None


def _action(facts: RankFacts) -> str:
    return facts.progress.actions[-1].name if facts.progress.actions else ""


def _in_awaited_thread(facts: RankFacts) -> tuple[Kind, str]:
    """What the thread that the user's code waits for is in; the user's code if it waits for no thread of interest."""
    thread = awaited_thread(facts)
    landmark, _ = innermost_landmark(thread.stack) if thread is not None else (None, ())
    if landmark is None or landmark.weak or landmark.kind not in _KINDS_OF_THREADS:
        return Kind.USER, ""
    return (Kind.USER, "") if _is_of_prediction(facts, landmark) else (landmark.kind, landmark.call)


def _blocked_by(collective: Collective, stack: tuple[Frame, ...]) -> bool:
    """Whether the main thread is blocked by this collective: on a device where it reads a result, on gloo in wait()."""
    if not stack or ".wait(" in stack[-1].code:
        return True
    return collective.backend.startswith("nccl") and (looks_like_device_sync(stack[-1]) or not stack[-1].user)


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

    The main thread is not at the collective that its device is in: a rank that reads no results runs ahead of its
    device, even to the end of the training, where memory is freed. CUDA waits by polling, so the main thread computes.
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


def asleep_s(facts: RankFacts, doing: Activity) -> float | None:
    """For how many seconds all threads that could end a rank's own wait have been asleep, waiting for one another.

    If it waits for the workers of its loader, theirs; else those of its process and of all workers. None if one runs or
    waits for something else, if the rank waits for peers, or if that is unknown.
    """
    slept_s = [worker.asleep_s for worker in facts.workers]
    if not (doing.waits_for_data and slept_s):
        slept_s.append(facts.machine.asleep_s)
    known = [one for one in slept_s if one is not None]
    return min(known) if len(known) == len(slept_s) and not doing.waits_for_peers else None


def awaited_thread(facts: RankFacts) -> AwaitedThread | None:
    """The thread that a rank's main thread waits for, if its stack shows that it still waits; None if it does not."""
    still_waits = is_in(libraries.WAITS_FOR_OTHERS, below_user(facts.stack))
    thread = facts.awaited_thread if still_waits else None
    # A report that is read again may lack the thread's stack.
    return thread if thread is not None and thread.stack else None


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


def innermost_action(progress: Progress) -> Action | None:
    """What Lightning is doing: a hook, a data fetch, a save; None between hooks."""
    return next((one for one in reversed(progress.actions) if one.name not in _WRAPPERS), None)


def is_in_action(progress: Progress, *ends: str) -> bool:
    """Whether the name of one of Lightning's present actions ends in one of these ways: ``".training_step"``."""
    return any(action.name.endswith(ends) for action in progress.actions)


def waits_in_init(facts: RankFacts) -> bool:
    """Whether a rank waits in ``init_process_group`` for the others to join."""
    return any(action.name == "init_process_group" for action in facts.progress.actions)


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
    if stage := stage_fetched(name):
        return f"{FETCHES}{stage}_dataloader)"
    # "SafeDDP.training_step" is the user's training_step, called through the strategy.
    return plain.rpartition(".")[2] if owner == "[Strategy" else plain


def presented_stage(facts: RankFacts) -> str:
    """The stage whose loaders a rank presents; empty if it presents none."""
    names = (action.name for action in facts.progress.actions)
    return next((name.removeprefix(AGREEMENT) for name in names if name.startswith(AGREEMENT)), "")


def has_no_trainer(facts: RankFacts) -> bool:
    """Whether a rank has no Trainer: only possible for a program that is inspected from outside."""
    return facts.inspection is not None and facts.progress.phase is Phase.UNKNOWN
