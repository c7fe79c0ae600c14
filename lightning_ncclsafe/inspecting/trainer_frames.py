"""The phase, hooks and batch of a Lightning Trainer, from the frames of a stack alone."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from lightning_ncclsafe.code.libraries import (
    EVALUATION_LOOPS,
    FETCHERS,
    FIT_LOOP_RUN,
    HOOKS_OF_CALLBACKS,
    HOOKS_OF_DATA,
    HOOKS_OF_MODULES,
    HOOKS_OF_STRATEGIES,
    INIT_PROCESS_GROUP,
    PREDICTION_LOOPS,
    SANITY_CHECK,
    SAVE_CHECKPOINT,
    SETUP_OF_LOADERS,
    STRATEGY_BARRIER,
    TEARDOWN,
    TESTING,
    TRAINER,
    TRAINING_LOOPS,
)
from lightning_ncclsafe.facts import Action, Phase, Progress
from lightning_ncclsafe.inspecting.looks import SeenFrame

_LOOPS = TRAINING_LOOPS | EVALUATION_LOOPS | PREDICTION_LOOPS
# Owners as Lightning's profiler names them, and the frame's variable that holds the owner.
_HOOKS = (
    (HOOKS_OF_MODULES, "LightningModule", "pl_module"),
    (HOOKS_OF_DATA, "LightningDataModule", ""),
    (HOOKS_OF_CALLBACKS, "Callback", "callback"),
    (HOOKS_OF_STRATEGIES, "Strategy", ""),
)
_AFTER_THE_LOOP = ("on_fit_end", "teardown", "on_exception")
# How py-spy writes an object: "<Net at 0x7f0a>".
_CLASS = re.compile(r"<([\w.]+) at 0x")
_WORD = re.compile(r"\w+")
_BARRIER = re.compile(r"""["']([\w.\[\]-]{1,60})["']""")
# How many frames below its call a hook's own function may be.
_NEAR = 4


def progress_in(stack: Sequence[SeenFrame], idle_s: float) -> Progress:
    """The progress of the Trainer as far as a stack shows it; the stack does not show the epoch.

    Args:
        stack: The stack of the main thread, outermost frame first.
        idle_s: Seconds for which that is known to have made no progress.
    """
    actions = tuple(Action(name=name, for_s=idle_s) for name in _actions(stack))
    phase = _phase(stack, [action.name for action in actions])
    batch = _batch_idx(stack) if phase not in (Phase.INIT, Phase.UNKNOWN) else -1
    return Progress(phase=phase, actions=actions, epoch=-1, batch_idx=batch, idle_s=idle_s)


def is_in_trainer(stack: Iterable[SeenFrame]) -> bool:
    """Whether a stack is in a call of the Trainer."""
    return TRAINER.has_any(stack)


def _phase(stack: Sequence[SeenFrame], actions: Sequence[str]) -> Phase:
    known = (
        (SAVE_CHECKPOINT, Phase.CHECKPOINT),
        (SANITY_CHECK, Phase.SANITY_CHECK),
        (EVALUATION_LOOPS, Phase.TEST if TESTING.has_any(stack) else Phase.VALIDATE),
        (PREDICTION_LOOPS, Phase.PREDICT),
        (TRAINING_LOOPS, Phase.TRAIN),
    )
    found = next((phase for code, phase in known if code.has_any(stack)), None)
    if found in (Phase.TRAIN, Phase.VALIDATE) and _is_before_the_loop(stack):
        return Phase.INIT
    if found is not None:
        return found
    if any(name.endswith(_AFTER_THE_LOOP) for name in actions):
        return Phase.TRAIN
    return Phase.INIT if is_in_trainer(stack) else Phase.UNKNOWN


def _is_before_the_loop(stack: Sequence[SeenFrame]) -> bool:
    """Whether the loop makes its loaders for the first time; later ones belong to an epoch."""
    return any(
        FIT_LOOP_RUN.has(above.file, above.function) and SETUP_OF_LOADERS.has(one.file, one.function)
        for above, one in pairwise(stack)
    )


def _actions(stack: Sequence[SeenFrame]) -> Iterator[str]:
    """The running actions, as Lightning names them to its profiler, outermost first."""
    loop = ""
    for depth, frame in enumerate(stack):
        if _LOOPS.has(frame.file, frame.function):
            loop = _class_of(frame.values.get("self", "")) or loop
        if SAVE_CHECKPOINT.has(frame.file, frame.function):
            yield "save_checkpoint"
        elif FETCHERS.has(frame.file, frame.function) and loop:
            yield f"[{loop}].{_fetched(stack)}_next"
            loop = ""
        elif INIT_PROCESS_GROUP.has(frame.file, frame.function):
            yield "init_process_group"
        elif TEARDOWN.has(frame.file, frame.function):
            yield "teardown"
        elif STRATEGY_BARRIER.has(frame.file, frame.function):
            named = _BARRIER.search(frame.values.get("name", ""))
            yield from [f"barrier:{named[1]}"] if named else []
        else:
            yield from _hook(stack, depth)


def _fetched(stack: Sequence[SeenFrame]) -> str:
    """What a loop fetches a batch of, as Lightning names it to its profiler."""
    if PREDICTION_LOOPS.has_any(stack):
        return "predict"
    if EVALUATION_LOOPS.has_any(stack):
        return "test" if TESTING.has_any(stack) else "val"
    return "train_dataloader"


def _hook(stack: Sequence[SeenFrame], depth: int) -> Iterator[str]:
    frame = stack[depth]
    for code, owner, variable in _HOOKS:
        if not code.has(frame.file, frame.function):
            continue
        # A profiler may put frames of its own between the two.
        below = [one for one in stack[depth + 1 : depth + 1 + _NEAR] if "profiler" not in one.file]
        named = _WORD.search(frame.values.get("hook_name", ""))
        hook = named[0] if named else below[0].function if below else ""
        held = _class_of(frame.values.get(variable, ""))
        of_frame = next(filter(None, (_class_of(one.values.get("self", "")) for one in below)), "")
        if hook:
            yield f"[{owner}]{held or of_frame or owner}.{hook}"


def _class_of(text: str) -> str:
    found = _CLASS.match(text)
    return found[1].rpartition(".")[2] if found else ""


def _batch_idx(stack: Sequence[SeenFrame]) -> int:
    texts = (frame.values.get("batch_idx", "") for frame in reversed(stack) if _LOOPS.has(frame.file, frame.function))
    return next((int(text) for text in texts if text.isascii() and text.isdecimal()), -1)
