"""What each batch has made, saves that failed and what is logged on all ranks; Lightning is not imported.

On the training's thread a number and the first nodes of the loss's graph are looked at in each batch, and with manual
optimization, or from a batch's second pass on, the line that calls for the pass: some microseconds; everything else is
read when ranks are asked.
"""

import itertools
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.code.libraries import GROUP_CREATION, LOGGED_VALUES, SEND_OR_RECV, TRAINING_LOOPS, Code
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import ExceptionFacts, Frame, LoggedKey, MetricFacts, StepFacts
from lightning_ncclsafe.probes.process.stacks import exception_facts, is_user_code, main_thread_stack, rank_condition
from lightning_ncclsafe.probes.trainer.source_lines import BEFORE_TRAINING, HookSource, own_functions

_BACKWARD = "manual_backward"
_MAX_NAMES = 8
_MAX_KEYS = 64
_MOST_RUNS = 64
# Where Lightning keeps what was logged, by the loops that have it.
_LOOPS = ("fit_loop.epoch_loop", "fit_loop.epoch_loop.val_loop", "validate_loop", "test_loop")
_TO_PEER = {"send": "dst", "recv": "src"}
# Lightning refuses a skipped step where there are several ranks, with this.
_REFUSED = "Skipping the `training_step`"
# DDP names parameters by their numbers among those that required a gradient when it was made.
_NO_GRADIENT = re.compile(r"indices which did not receive grad for rank \d+:((?: \d+)+)")
# Where passes of a batch were called is noted for so many of them, with so many frames of the user's.
_MOST_CALLS, _MOST_CALLERS, _LOOKED_AT = 8, 4, 24
# Of the batches in which their number changed, so many are reported.
_TOLD_CALLS = 16
# Lightning divides a loss by the number of batches that accumulate, and a precision may scale it.
_MOST_OPERATIONS = 4

Call = tuple[tuple[CodeType, int], ...]
"""Where something was called: the user's functions with their lines, the innermost first."""


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
        self._calls: list[Call] = []
        self._calls_of_runs: deque[tuple[Call, ...]] = deque(maxlen=_MOST_RUNS)
        self._is_users: dict[str, bool] = {}
        self._without_graph = 0
        self._trained: tuple[str, ...] = ()

    def begin(self) -> None:
        """The first batch is to come; where training is resumed, some have been before."""
        # A loop of the user's own may count in another way; then nothing is noted.
        with suppress(AttributeError):
            total = _batches(self._trainer).total
            self._last, self._total = total.ready, total
        with suppress(AttributeError):
            ignored = getattr(getattr(self._trainer, "model", None), "parameters_to_ignore", ())
            self._trained = tuple(name for name in _trained(self._trainer.lightning_module) if name not in ignored)

    def backward(self, loss: Any = None, *, is_reduced: bool = True) -> None:
        """A backward pass begins, on the main thread: what is done here is done in every batch.

        Args:
            loss: What it begins with.
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
        module = getattr(self._trainer, "lightning_module", None)
        self._without_graph += _is_from_nothing(loss, module)
        is_by_hand = not getattr(module, "automatic_optimization", True)
        if len(self._calls) < _MOST_CALLS and (is_by_hand or self._made[0] > 1):
            # Lightning's own first pass of a batch is that of every batch; an optimizer may ask for more.
            self._calls += [()] * (self._made[0] - 1 - len(self._calls))
            self._calls.append(self._called_from())

    def _called_from(self) -> Call:
        """The user's functions up to Lightning's, within its loop."""
        found: list[tuple[CodeType, int]] = []
        for frame, line in itertools.islice(traceback.walk_stack(sys._getframe(2)), _LOOKED_AT):
            code = frame.f_code
            if code.co_filename not in self._is_users:
                self._is_users[code.co_filename] = is_user_code(code.co_filename)
            if self._is_users[code.co_filename]:
                found.append((code, line))
            elif found or TRAINING_LOOPS.has(code.co_filename, code.co_name):
                break
        return tuple(found[:_MOST_CALLERS])

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
                self._calls_of_runs.append(tuple(self._calls))
            self._counted = self._at
        self._made, self._calls = [0, 0], []

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
        calls = [*self._calls_of_runs]
        # Where another batch has begun, this one is over, too.
        if made and self._total is not None and (pending or _batch_is_over(self._trainer)):
            counted = self._at
            if not runs or runs[-1][2:] != made:
                runs.append((*self._at, *made))
                calls.append(tuple(self._calls))
        is_under_way = bool(made) and self._at != counted
        calls += [tuple(self._calls)] if is_under_way else []
        calls = [*itertools.repeat((), max(len(calls) - _TOLD_CALLS, 0)), *calls[-_TOLD_CALLS:]]
        places = dict.fromkeys(itertools.islice((call for call in itertools.chain(*calls[::-1]) if call), _TOLD_CALLS))
        module = getattr(self._trainer, "lightning_module", None)
        missing = self._named_by_ddp(error) or _without_gradient(module)
        frozen = self._frozen(module)
        makes_group = any(True for _ in _main_frames(GROUP_CREATION))
        users = [module, *_callbacks(self._trainer)]
        return StepFacts(
            with_backward=self._with_backward,
            skipped=skipped,
            skipped_epoch=last[0],
            skipped_batch=last[1],
            passes=tuple(runs),
            passes_epoch=counted[0],
            passes_batch=counted[1],
            under_way=(*self._at, *made) if is_under_way else (),
            passes_from=tuple(tuple(map(_place, batch)) for batch in calls) if any(calls) else (),
            led_around={_place(call): _led_around(call) for call in places},
            passes_at=_source(module, "training_step").calls_under_condition(_BACKWARD) if len(runs) > 1 else (),
            returns_nothing=_source(module, "training_step").returns_nothing() if skipped else (),
            without_graph=self._without_graph,
            leaves_at=_lines([module], HookSource.makes_leaves) if self._without_graph else (),
            without_gradient=tuple(missing[:_MAX_NAMES]),
            without_gradient_count=len(missing),
            unused_at=_left_out_at(module, missing) if missing else "",
            frozen=tuple(frozen[:_MAX_NAMES]),
            frozen_at=_lines(users, HookSource.freezes) if frozen else (),
            logged=tuple(_logged(self._trainer, module)),
            monitored=tuple(_monitored(self._trainer, module)),
            metrics=tuple(itertools.islice(_metrics(module), _MAX_KEYS)),
            reducing=_reducing(),
            peer=_peer(),
            groups_made=process_groups.groups_made(),
            groups_at=(_groups_under_condition() or _lines(users, _makes_group)) if makes_group else (),
            accumulates_at=_lines(users, _sets_accumulation) if any(run[3:4] > (0,) for run in runs) else (),
        )

    def _named_by_ddp(self, error: str) -> list[str]:
        named = _NO_GRADIENT.search(error)
        numbers = map(int, named[1].split()) if named else ()
        return [self._trained[number] for number in numbers if number < len(self._trained)]

    def _frozen(self, module: Any) -> list[str]:
        if not self._trained or module is None:
            return []
        trained = {*_trained(module)}
        return [name for name in self._trained if name not in trained]


def _is_from_nothing(loss: Any, module: Any) -> bool:
    """Whether a loss leads back, in a few operations, to a tensor that is no parameter, and to nothing else."""
    node = getattr(loss, "grad_fn", None)
    if node is None:
        return loss is not None
    for _ in range(_MOST_OPERATIONS):
        before = [function for function, _ in node.next_functions if function is not None]
        if len(before) != 1:
            return False
        node = before[0]
        if (leaf := getattr(node, "variable", None)) is not None:
            return all(leaf is not parameter for parameter in module.parameters())
    return False


def _trained(module: Any) -> list[str]:
    """The parameters that require a gradient."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _callbacks(trainer: Any) -> list[Any]:
    return [*getattr(trainer, "callbacks", ())]


def _lines(owners: Iterable[Any], asked: Callable[[HookSource], tuple[str, ...]]) -> tuple[str, ...]:
    """Those of the user's functions of these objects that have one, the first few."""
    kinds = dict.fromkeys(type(owner) for owner in owners if owner is not None)
    functions = itertools.chain(*map(own_functions, kinds))
    found = dict.fromkeys(line for function in functions for line in asked(HookSource(function)))
    return tuple(itertools.islice(found, _MAX_NAMES))


def _place(call: Call) -> str:
    return f"{call[0][0].co_filename}:{call[0][1]} in {call[0][0].co_name}" if call else ""


def _led_around(call: Call) -> tuple[str, ...]:
    return tuple(way for code, line in call for way in HookSource(code).leads_around(line))[:_MAX_NAMES]


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
    """Epoch and index of the current batch, or of the last one; -1 where the loop does not know."""
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


def _left_out_at(module: Any, missing: list[str]) -> str:
    """Where the user's code leaves out the largest part that the first of these parameters belongs to, or uses it."""
    names = _trained(module)
    parts = missing[0].split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    whole = (part for part in prefixes if all(name in missing for name in names if name.startswith(f"{part}.")))
    depth = len(next(whole, missing[0]).split("."))
    # Outwards to the user's code that calls this part; what is called there may still leave out what it consists of.
    used = next(filter(None, (_use_of(module, parts, level) for level in range(depth - 1, -1, -1))), None)
    within = (_use_of(module, parts, level) for level in range(depth, len(parts)))
    ways = [used.leads_around] if used is not None else []
    if not any(ways):
        ways += [inner.leads_around for inner in within if inner is not None]
    told = next(filter(None, ways), ())
    return told[0] if len(told) == 1 else used.place if used is not None else ""


class _Use(NamedTuple):
    """A line that uses a part of the model, and what may have led around it."""

    place: str
    leads_around: tuple[str, ...]


def _use_of(module: Any, parts: list[str], level: int) -> _Use | None:
    """Where the user's code of what this part belongs to uses it."""
    for source in _functions_of(_part_of(module, parts[:level])):
        if line := source.uses(parts[level]):
            return _Use(source.place(line), source.leads_around(line))
    return None


def _part_of(module: Any, path: list[str]) -> Any:
    for name in path:
        module = getattr(module, name, None)
    return module


def _functions_of(part: Any) -> Iterator[HookSource]:
    """Those that run in a step, the usual ones first."""
    usual = [_source(part, name) for name in ("forward", "training_step")]
    others = (function for function in own_functions(type(part)) if function.__name__ not in BEFORE_TRAINING)
    yield from itertools.chain(usual, map(HookSource, others))


def _logged(trainer: Any, module: Any) -> Iterator[LoggedKey]:
    for metric in list(_synced(trainer))[:_MAX_KEYS]:
        meta = metric.meta
        name, hook = str(meta.name), str(meta.fx)
        source, line = _call_that_logs(name, trainer, module, hook)
        condition = rank_condition(source.file, line) if line else ""
        states = tuple(map(str, getattr(getattr(metric, "value", None), "metric_state", ())))
        yield LoggedKey(name=name, hook=hook, place=source.place(line), rank_condition=condition, states=states)


def _metrics(module: Any) -> Iterator[MetricFacts]:
    """Those that the model holds; a collection of them is no metric, and has no states."""
    for name, part in getattr(module, "named_modules", tuple)():
        states = getattr(part, "metric_state", None)
        if isinstance(states, dict) and states:
            yield MetricFacts(
                name=str(name),
                type=type(part).__name__,
                states=tuple(map(str, states)),
                by_entry=tuple(str(state) for state in states if _is_gathered_by_entry(part, state)),
            )


def _is_gathered_by_entry(metric: Any, state: Any) -> bool:
    """Whether a state is a list with ``dist_reduce_fx=None``."""
    defaults, reductions = getattr(metric, "_defaults", {}), getattr(metric, "_reductions", {})
    return isinstance(defaults.get(state), list) and reductions.get(state, "") is None


def _call_that_logs(name: str, trainer: Any, module: Any, hook: str) -> tuple[HookSource, int]:
    """The hook itself comes first, of the module and of callbacks, then what it may have called: other methods.

    Where none has the key written out, the only call in these hooks, or else in such methods, that may put it together.
    """
    hooks = [_source(owner, hook) for owner in (module, *_callbacks(trainer))]
    others = [HookSource(function) for function in own_functions(type(module)) if not _is_hook(function.__name__)]
    for source in (*hooks, *map(HookSource, own_functions(type(module)))):
        if line := source.logs(name):
            return source, line
    for sources in (hooks, others):
        found = [(source, line) for source in sources for line in source.may_log(name)]
        if found:
            return found[0] if len(found) == 1 else (found[0][0], 0)
    return hooks[0], 0


def _is_hook(name: str) -> bool:
    return name.startswith("on_") or name.endswith("_step")


def _monitored(trainer: Any, module: Any) -> Iterator[LoggedKey]:
    """By name as callbacks look for it: what is logged on each step and on each epoch has two more."""
    monitors = {getattr(callback, "monitor", None) for callback in _callbacks(trainer)} - {None}
    for metric in itertools.chain(*map(_results, _owners(trainer))) if monitors else ():
        name = str(metric.meta.name)
        if not monitors.isdisjoint((name, f"{name}_step", f"{name}_epoch")):
            source, line = _call_that_logs(name, trainer, module, str(metric.meta.fx))
            yield LoggedKey(name=name, hook=str(metric.meta.fx), place=source.place(line))


def _owners(trainer: Any) -> Iterator[Any]:
    for path in _LOOPS:
        owner = trainer
        for name in path.split("."):
            owner = getattr(owner, name, None)
        yield owner


def _results(owner: Any) -> list[Any]:
    return list((getattr(owner, "_results", None) or {}).values())


def _synced(trainer: Any) -> Iterable[Any]:
    """What Lightning knows of each key that ranks reduce together."""
    for metric in itertools.chain(*map(_results, _owners(trainer))):
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
    return tuple(place for source in sources for place in _makes_group(source))[:_MAX_NAMES]


def _makes_group(source: HookSource) -> tuple[str, ...]:
    return source.calls_under_condition("new_group")


def _sets_accumulation(source: HookSource) -> tuple[str, ...]:
    return source.sets(["accumulate_grad_batches"])
