"""What each batch has made, saves that failed and what is logged on all ranks; Lightning is not imported.

On the training's thread one number is looked at in each batch; everything else is read when ranks are asked.
"""

import itertools
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_ncclsafe import _torch
from lightning_ncclsafe.facts import ExceptionFacts, Frame
from lightning_ncclsafe.known_code import GROUP_CREATION, LOGGED_VALUES, SEND_OR_RECV, Code
from lightning_ncclsafe.marks import Mark
from lightning_ncclsafe.probes.source_lines import HookSource, own_functions
from lightning_ncclsafe.probes.stacks import exception_facts, main_thread_stack, rank_condition
from lightning_ncclsafe.step_facts import LoggedKey, MetricFacts, StepFacts

_BACKWARD = "manual_backward"
_MAX_NAMES = 8
_MAX_KEYS = 64
_MOST_RUNS = 64
# Where Lightning keeps what was logged, by the loops that have it.
_LOOPS = ("fit_loop.epoch_loop", "fit_loop.epoch_loop.val_loop", "validate_loop", "test_loop")
_TO_PEER = {"send": "dst", "recv": "src"}
# Lightning refuses a skipped step where there are several ranks, with this.
_REFUSED = "Skipping the `training_step`"


class StepRecord:
    """Notes training batches without a backward pass, and a save that failed.

    Args:
        trainer: The ``Trainer``.
        is_consequence: Whether an exception only says that a collective failed.

    Attributes:
        failed_save: What the last save of a checkpoint raised; None where it went well.
    """

    def __init__(self, trainer: Any, is_consequence: Callable[[BaseException], bool] = lambda error: False) -> None:
        self._trainer = trainer
        self._is_consequence = is_consequence
        self.failed_save: ExceptionFacts | None = None
        self._total: Any = None
        self._last = 0
        self._with_backward = 0
        self._skipped = 0
        self._last_skipped = (-1, -1)
        self._at = self._counted = (-1, -1)
        # Backward passes, those of them that reduced nothing, and steps by optimizer.
        self._made: list[int] = [0, 0]
        self._runs: deque[tuple[int, ...]] = deque(maxlen=_MOST_RUNS)

    def begin(self) -> None:
        """The first batch is to come; where training is resumed, some have been before."""
        # A loop of the user's own may count in another way; then nothing is noted.
        with suppress(AttributeError):
            total = _batches(self._trainer).total
            self._last, self._total = total.ready, total

    def backward(self, *, is_reduced: bool = True) -> None:
        """A backward pass begins, on the main thread: what is done here is done in every batch.

        Args:
            is_reduced: Whether ranks exchange its gradients, which they do not while they accumulate them.
        """
        ready = self._total.ready if self._total is not None else self._last
        if ready != self._last:
            self._count_passes()
            self._at = _now(self._trainer)
            self._with_backward += 1
            if ready > self._last + 1:
                self._skipped += ready - self._last - 1
                self._last_skipped = _before(self._trainer)
            self._last = ready
        self._made[0] += 1
        self._made[1] += not is_reduced

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step, on the main thread."""
        optimizers = getattr(self._trainer, "optimizers", ())
        number = next((index for index, one in enumerate(optimizers) if one is optimizer), -1)
        if number >= 0:
            self._made += [0] * (number + 3 - len(self._made))
            self._made[number + 2] += 1

    def _count_passes(self) -> None:
        """Of the batch before, which is over."""
        if self._made[0] and self._at[1] >= 0:
            if not self._runs or self._runs[-1][2:] != _told(self._made):
                self._runs.append((*self._at, *_told(self._made)))
            self._counted = self._at
        self._made = [0, 0]

    def save_failed(self, error: BaseException) -> None:
        """The save of a checkpoint has raised, on the main thread; whoever called it may catch that."""
        raised = exception_facts(error, is_consequence=self._is_consequence(error))
        self.failed_save = replace(raised, stack=(*_callers(), *raised.stack))

    def saved(self) -> None:
        """All ranks are past the save of a checkpoint."""
        self.failed_save = None

    def facts(self, *, error: str = "") -> StepFacts:
        """What is known now; for another thread, as source files are read.

        Args:
            error: Text of the exception that this rank raised, if any.
        """
        pending = self._total.ready - self._last if self._total is not None else 0
        # What the batch under way will have is not known yet.
        is_over = pending > 0 and (error.startswith(_REFUSED) or _batch_is_over(self._trainer))
        skipped, last = self._skipped + max(pending - (not is_over), 0), self._last_skipped
        if skipped > self._skipped:
            last = _now(self._trainer) if is_over else _before(self._trainer)
        runs, counted, made = [*self._runs], self._counted, _told(self._made)
        if made and not pending and self._total is not None and _batch_is_over(self._trainer):
            counted = self._at
            if not runs or runs[-1][2:] != made:
                runs.append((*self._at, *made))
        module = getattr(self._trainer, "lightning_module", None)
        missing = _without_gradient(module)
        makes_group = any(True for _ in _main_frames(GROUP_CREATION))
        return StepFacts(
            with_backward=self._with_backward,
            skipped=skipped,
            skipped_epoch=last[0],
            skipped_batch=last[1],
            passes=tuple(runs),
            passes_epoch=counted[0],
            passes_batch=counted[1],
            under_way=(*self._at, *made) if made and self._at != counted else (),
            passes_at=_source(module, "training_step").calls_under_condition(_BACKWARD) if len(runs) > 1 else (),
            returns_nothing=_source(module, "training_step").returns_nothing() if skipped else (),
            without_gradient=tuple(missing[:_MAX_NAMES]),
            without_gradient_count=len(missing),
            unused_at=_use_of(module, missing[0].partition(".")[0]) if missing else "",
            logged=tuple(_logged(self._trainer, module)),
            metrics=tuple(itertools.islice(_metrics(module), _MAX_KEYS)),
            reducing=_reducing(),
            peer=_peer(),
            groups_made=_torch.groups_made(),
            groups_at=_groups_under_condition() if makes_group else (),
        )


def _told(made: list[int]) -> tuple[int, ...]:
    """Without the zeros at the end."""
    return tuple(made[: max((index + 1 for index, count in enumerate(made) if count), default=0)])


def _callers() -> list[Frame]:
    """Those of the save; the frame with the save itself is the first of the exception's."""
    stack = main_thread_stack()
    heard = next((i for i, frame in enumerate(stack) if frame.mark == Mark.LISTENER), 0)
    return list(stack[: max(heard - 1, 0)])


def _batches(trainer: Any) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress


def _now(trainer: Any) -> tuple[int, int]:
    """Epoch and index of the batch under way, or of the last one; -1 where the loop does not say."""
    with suppress(AttributeError):
        return int(trainer.current_epoch), int(_batches(trainer).current.ready) - 1
    return -1, -1


def _before(trainer: Any) -> tuple[int, int]:
    """The same of the batch before; -1 in place of an index that is not known any more."""
    epoch, batch = _now(trainer)
    return (epoch, batch - 1) if batch > 0 else (max(epoch - 1, -1), -1)


def _batch_is_over(trainer: Any) -> bool:
    current = _batches(trainer).current
    return bool(current.processed >= current.ready)


def _without_gradient(module: Any) -> list[str]:
    """Only where some have one: all have none before the first backward pass, and after ``zero_grad``."""
    if module is None:
        return []
    wanted = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    missing = [name for name, parameter in wanted if parameter.grad is None]
    return missing if len(missing) < len(wanted) else []


def _source(module: Any, hook: str) -> HookSource:
    """That of the class: while a strategy runs a step, the module's own ``forward`` is another function."""
    return HookSource(getattr(type(module), hook, None))


def _use_of(module: Any, part: str) -> str:
    sources = (_source(module, name) for name in ("forward", "training_step"))
    return next((source.place(line) for source in sources if (line := source.uses(part))), "")


def _logged(trainer: Any, module: Any) -> Iterator[LoggedKey]:
    for metric in list(_synced(trainer))[:_MAX_KEYS]:
        meta = metric.meta
        name, hook = str(meta.name), str(meta.fx)
        source, line = _call_that_logs(name, module, hook)
        condition = rank_condition(source.file, line) if line else ""
        states = tuple(map(str, getattr(getattr(metric, "value", None), "metric_state", ())))
        yield LoggedKey(name=name, hook=hook, place=source.place(line), rank_condition=condition, states=states)


def _metrics(module: Any) -> Iterator[MetricFacts]:
    """Those that the model holds; a collection of them is no metric, and has no states."""
    for name, part in getattr(module, "named_modules", tuple)():
        states = getattr(part, "metric_state", None)
        if isinstance(states, dict) and states:
            yield MetricFacts(name=str(name), type=type(part).__name__, states=tuple(map(str, states)))


def _call_that_logs(name: str, module: Any, hook: str) -> tuple[HookSource, int]:
    """The hook itself comes first, then what it may have called: the module's other methods."""
    source = _source(module, hook)
    sources = itertools.chain([source], map(HookSource, own_functions(type(module))))
    return next(((found, line) for found in sources if (line := found.logs(name))), (source, 0))


def _synced(trainer: Any) -> Iterable[Any]:
    """What Lightning knows of each key that ranks reduce together."""
    for path in _LOOPS:
        owner = trainer
        for name in path.split("."):
            owner = getattr(owner, name, None)
        for metric in list((getattr(owner, "_results", None) or {}).values()):
            meta = metric.meta
            if not metric.is_tensor or (meta.sync.should and not meta.sync.rank_zero_only):
                yield metric


def _main_frames(code: Code) -> Iterator[Any]:
    """The main thread's frames in there, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for inner, _ in traceback.walk_stack(frame):
        if code.has(inner.f_code.co_filename, inner.f_code.co_name):
            yield inner


def _reducing() -> str:
    """The key that Lightning's frame on the main thread holds; nothing but that frame's own variables is looked at."""
    metas = (getattr(frame.f_locals.get("self"), "meta", None) for frame in _main_frames(LOGGED_VALUES))
    return next((str(meta.name) for meta in metas if meta is not None), "")


def _peer() -> int:
    """The rank that ``send`` or ``recv``, which the main thread is in, was called with."""
    peers = (frame.f_locals.get(_TO_PEER[frame.f_code.co_name]) for frame in _main_frames(SEND_OR_RECV))
    return next((peer for peer in peers if isinstance(peer, int)), -1)


def _groups_under_condition() -> tuple[str, ...]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    sources = (HookSource(inner.f_code) for inner, _ in traceback.walk_stack(frame))
    return tuple(place for source in sources for place in source.calls_under_condition("new_group"))[:_MAX_NAMES]
