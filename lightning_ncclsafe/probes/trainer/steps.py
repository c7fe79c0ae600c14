"""What each training batch skipped, and saves that failed; Lightning is not imported.

On the training's thread, each batch reads a number and the first nodes of the loss's graph, and with manual
optimization, or from a batch's second pass on, the line that calls the pass: some microseconds. Everything else is read
when ranks are asked.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.code.libraries import GROUP_CREATION, ROOTED, SEND_OR_RECV, SKIPPING_REFUSED
from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import ExceptionFacts, Frame, StepFacts, TimeoutLine
from lightning_ncclsafe.probes.process.stacks import (
    exception_facts,
    is_user_code,
    main_thread_frames,
    main_thread_stack,
)
from lightning_ncclsafe.probes.source.scopes import (
    MOST_PLACES,
    Scope,
    first_places,
    places_in,
    scope_of,
    scopes_in,
    user_files,
)
from lightning_ncclsafe.probes.source.syntax import is_constant
from lightning_ncclsafe.probes.source.unordered import made_in_order_of_set
from lightning_ncclsafe.probes.trainer import awaited_works, gradients, logged_keys
from lightning_ncclsafe.probes.trainer.passes import Batch, BatchPasses
from lightning_ncclsafe.probes.trainer.state import epoch_is_over
from lightning_ncclsafe.probes.trainer.timeout_lines import timeout_lines
from lightning_ncclsafe.probes.trainer.unsaved import Unsaved, kept_at, unsaved

_BACKWARD = "manual_backward"
_MOST_NAMES = 8
_MOST_METRICS = 64
_TO_PEER = {"send": "dst", "recv": "src"}
# torch's names of variables for ranks within the group.
_ROOTS = ("group_src", "group_dst")
# Its name of a variable for the members of a group that it creates.
_MEMBERS = "global_ranks_in_group"
# Functions of Lightning, DDP and FSDP2 that keep a backward pass from reducing gradients.
_UNREDUCED = ("block_backward_sync", "no_backward_sync", "no_sync", "set_requires_gradient_sync")
# Its errors for what is no loss.
_NO_LOSS = re.compile(r"In automatic.optimization, .*`training_step`")


class StepRecord:
    """Records training batches, their passes, batches without a backward pass, and a failed save.

    Attributes:
        failed_save: What the last save of a checkpoint raised; None if it succeeded.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.failed_save: ExceptionFacts | None = None
        self._unsaved: Unsaved | None = None
        self._total: Any = None
        self._last = 0
        self._has_own_backward = False
        self._is_first_pass = False
        self._with_backward = 0
        self._skipped = 0
        self._last_skipped: Batch = (-1, -1)
        self._validated = 0
        self._passes = BatchPasses()
        self._without_graph = 0
        self._trained: tuple[str, ...] = ()

    def begin(self) -> None:
        """Called before the first batch; if training is resumed, there have been batches before."""
        self._has_own_backward = _has_own_backward(getattr(self._trainer, "lightning_module", None))
        # A loop of the user's own may count differently; then nothing is recorded.
        with suppress(AttributeError):
            total = _batches(self._trainer).total
            self._last, self._total = total.ready, total
        with suppress(AttributeError):
            ignored = getattr(getattr(self._trainer, "model", None), "parameters_to_ignore", ())
            trained = gradients.trained_parameters(self._trainer.lightning_module)
            self._trained = tuple(name for name in trained if name not in ignored)

    def backward(self, loss: Any = None, *, is_reduced: bool = True) -> None:
        """Called when a backward pass begins, on the main thread, in every batch.

        Args:
            is_reduced: Whether gradients are reduced, not only accumulated.
        """
        self._is_first_pass = False
        ready = self._total.ready if self._total is not None else self._last
        if ready != self._last:
            self._is_first_pass = True
            self._passes.begin_batch(_now(self._trainer))
            self._with_backward += 1
            if ready > self._last + 1:
                self._skipped += ready - self._last - 1
                self._last_skipped = _before(self._trainer)
            self._last = ready
        module = getattr(self._trainer, "lightning_module", None)
        self._without_graph += gradients.is_from_nothing(loss, module)
        is_manual = not getattr(module, "automatic_optimization", True)
        self._passes.backward(is_reduced=is_reduced, is_manual=is_manual)

    def passed(self) -> None:
        """Called after the backward pass. A ``backward`` of the user's may have returned without making one.

        That shows only where nothing has a gradient: with ``zero_grad(set_to_none=True)`` before, which is the default,
        and without accumulated gradients.
        """
        if not (self._has_own_backward and self._is_first_pass):
            return
        if all(parameter.grad is None for parameter in self._trainer.lightning_module.parameters()):
            self._last -= 1
            self._with_backward -= 1
            self._passes.take_back()

    def validates(self) -> None:
        """Called when a batch of validation begins, on the main thread."""
        self._validated += 1

    def stepped(self, optimizer: Any) -> None:
        """Called after a step of an optimizer, on the main thread."""
        optimizers = getattr(self._trainer, "optimizers", ())
        number = next((index for index, one in enumerate(optimizers) if one is optimizer), -1)
        if number >= 0:
            self._passes.stepped(number)

    def save_failed(self, error: BaseException) -> None:
        """Called when the save of a checkpoint raises, on the main thread; its caller may catch that."""
        raised = exception_facts(error, is_consequence=process_groups.is_communication_error(error))
        self.failed_save = replace(raised, stack=(*_callers(), *raised.stack))
        self._unsaved = unsaved(error)

    def saved(self) -> None:
        """Called when all ranks are past the save of a checkpoint."""
        self.failed_save = self._unsaved = None

    def facts(self, *, error: str = "") -> StepFacts:
        """The facts now, without those that have methods of their own; for another thread, as it reads source files.

        Args:
            error: Text of the exception that this rank raised, if any.
        """
        pending = self._total.ready - self._last if self._total is not None else 0
        skipped, last = self._skipped_until(pending, error)
        # If another batch has begun, this one is over, too.
        is_over = self._total is not None and bool(pending or _batch_is_over(self._trainer))
        passes = self._passes.facts(is_over=is_over)
        runs = passes["passes"]
        module = getattr(self._trainer, "lightning_module", None)
        missing = gradients.named_by_ddp(error, self._trained) or gradients.without_gradient(module)
        unused_at, unused_under = gradients.left_out_at(module, missing) if missing else ("", None)
        differing = gradients.of_other_size(error, module)
        frozen = self._frozen(module)
        makes_group = any(True for _ in main_thread_frames(GROUP_CREATION))
        users = logged_keys.users_of(self._trainer)
        step = scope_of(getattr(type(module), "training_step", None))
        operations, begun_at = awaited_works.awaited()
        entry = self._unsaved  # which the main thread may reset meanwhile
        return StepFacts(
            **passes,
            with_backward=self._with_backward,
            skipped=skipped,
            validated=self._validated,
            skipped_epoch=last[0],
            skipped_batch=last[1],
            passes_at=step.calls_under_condition(_BACKWARD) if len(runs) > 1 else (),
            returns_nothing=_returns_nothing(module) if skipped else (),
            unsaved=entry.words if entry is not None else "",
            unsaved_at=self._kept_at(entry) if entry is not None else (),
            returns_no_loss=_returns_no_loss(module) if _NO_LOSS.match(error) else (),
            without_graph=self._without_graph,
            leaves_at=gradients.leaves_at(module) if self._without_graph else (),
            without_gradient=tuple(missing[:_MOST_NAMES]),
            without_gradient_count=len(missing),
            unused_at=unused_at,
            unused_under=unused_under,
            other_size=differing,
            other_size_at=gradients.made_at(module, differing) if differing else "",
            frozen=tuple(frozen[:_MOST_NAMES]),
            frozen_at=gradients.frozen_at(users) if frozen else (),
            logged=tuple(logged_keys.logged(self._trainer)),
            unlogged=tuple(itertools.islice(logged_keys.unlogged(self._trainer), MOST_PLACES)),
            monitored=tuple(logged_keys.monitored(self._trainer)),
            unmonitored=tuple(logged_keys.unmonitored(self._trainer)),
            metrics=tuple(itertools.islice(logged_keys.metrics(module), _MOST_METRICS)),
            reducing=logged_keys.reduced_key(),
            peer=_peer(),
            awaited=operations,
            begun_at=begun_at,
            root=_root(),
            groups_made=process_groups.groups_made(),
            making=_members(),
            groups_at=(_groups_under_condition() or places_in(users, _groups_made)) if makes_group else (),
            accumulates_at=(places_in(users, _accumulates) if any(run[3:4] > (0,) for run in runs) else ()),
        )

    def _kept_at(self, entry: Unsaved) -> tuple[str, ...]:
        users = [*logged_keys.users_of(self._trainer), getattr(self._trainer, "datamodule", None)]
        return places_in(users, lambda scope: kept_at(entry.key, scope))

    def timeouts_at(self) -> tuple[TimeoutLine, ...]:
        """The lines that give a group, the store or a barrier a timeout, by a search in the user's source."""
        others = (getattr(self._trainer, name, None) for name in ("datamodule", "strategy"))
        return timeout_lines([*logged_keys.users_of(self._trainer), *others])

    def new_groups_at(self) -> tuple[str, ...]:
        """The calls of ``new_group`` that all ranks have to make; none while there is only the default group."""
        return _new_groups_of_all(logged_keys.users_of(self._trainer)) if process_groups.groups_made() > 1 else ()

    def unordered_groups_at(self) -> str:
        """The only call of ``new_group``, if it is in a loop over a set; none while there is only the default group."""
        return made_in_order_of_set("new_group", user_files()) if process_groups.groups_made() > 1 else ""

    def _skipped_until(self, pending: int, error: str) -> tuple[int, Batch]:
        """The number of batches without a backward pass, and the last of them; the current batch is still unknown."""
        is_over = pending > 0 and (error.startswith(SKIPPING_REFUSED) or _batch_is_over(self._trainer))
        more = max(pending - (not is_over), 0)
        if not more:
            return self._skipped, self._last_skipped
        return self._skipped + more, _now(self._trainer) if is_over else _before(self._trainer)

    def _frozen(self, module: Any) -> list[str]:
        if not self._trained or module is None:
            return []
        trained = {*gradients.trained_parameters(module)}
        return [name for name in self._trained if name not in trained]


def _has_own_backward(module: Any) -> bool:
    code = getattr(getattr(type(module), "backward", None), "__code__", None)
    return code is not None and is_user_code(code.co_filename)


def _returns_nothing(module: Any) -> tuple[str, ...]:
    """Where the user's functions may skip the backward pass of a batch."""
    scopes = itertools.chain(_with_decorators(module, "training_step"), _with_decorators(module, "backward"))
    returns = ((scope, one) for scope in scopes for one in scope.each(ast.Return))
    return tuple(scope.place(one.lineno) for scope, one in returns if one.value is None or is_constant(one.value, None))


def _returns_no_loss(module: Any) -> tuple[str, ...]:
    """The lines of ``training_step`` that return a dict without a loss; if none shows that, all that return a value."""
    scopes = [*_with_decorators(module, "training_step")]
    returns = [(scope, one) for scope in scopes for one in scope.each(ast.Return) if one.value is not None]
    without = [(scope, one) for scope, one in returns if isinstance(one.value, ast.Dict) and not _has_loss(one.value)]
    return tuple(scope.place(one.lineno) for scope, one in (without or returns))[:MOST_PLACES]


def _has_loss(value: ast.Dict) -> bool:
    """Whether a dict has a loss, or may have one by what it is made of."""
    items = zip(value.keys, value.values, strict=True)
    return any(
        key is None or (isinstance(key, ast.Constant) and key.value == "loss" and not is_constant(one, None))
        for key, one in items
    )


def _with_decorators(module: Any, hook: str) -> Iterator[Scope]:
    """A hook of a module's class, and the decorators around it, which may return in its place.

    While a strategy runs a step, the instance has another ``forward``.
    """
    function = getattr(type(module), hook, None)
    yield scope_of(function)
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield scope_of(getattr(function, "__code__", None))
        function = wrapped


def _callers() -> list[Frame]:
    """The callers of the save; the save itself is the first frame of the exception."""
    stack = main_thread_stack()
    heard = next((i for i, frame in enumerate(stack) if frame.mark == Mark.LISTENER), 0)
    return list(stack[: max(heard - 1, 0)])


def _batches(trainer: Any) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress


def _now(trainer: Any) -> Batch:
    """Epoch and index of the current or last batch; -1 if the loop does not know."""
    with suppress(AttributeError):
        # After an epoch, its number is one less than that of the current one.
        return int(trainer.current_epoch) - epoch_is_over(trainer), int(_batches(trainer).current.ready) - 1
    return -1, -1


def _before(trainer: Any) -> Batch:
    """Epoch and index of the batch before; -1 for an index that is no longer known."""
    epoch, batch = _now(trainer)
    return (epoch, batch - 1) if batch > 0 else (max(epoch - 1, -1), -1)


def _batch_is_over(trainer: Any) -> bool:
    current = _batches(trainer).current
    return bool(current.processed >= current.ready)


def _peer() -> int:
    """The peer of the ``send`` or ``recv`` that the main thread is in."""
    peers = (frame.f_locals.get(_TO_PEER[frame.f_code.co_name]) for frame in main_thread_frames(SEND_OR_RECV))
    return next((peer for peer in peers if isinstance(peer, int)), -1)


def _root() -> int:
    """The source or destination, by its number in the group, of a collective that the main thread is in."""
    for frame in main_thread_frames(ROOTED):
        given = (frame.f_locals.get(name) for name in _ROOTS)
        return next((root for root in given if isinstance(root, int)), -1)
    return -1


def _members() -> tuple[int, ...]:
    """The members of the process group that the main thread is creating; empty if it creates none."""
    for frame in main_thread_frames(GROUP_CREATION):
        members = frame.f_locals.get(_MEMBERS)
        if isinstance(members, list) and members and all(isinstance(rank, int) for rank in members):
            return tuple(members)
    return ()


def _groups_under_condition() -> tuple[str, ...]:
    scopes = (scope_of(frame.f_code) for frame in main_thread_frames())
    functions = (scope for scope in scopes if scope.is_function)
    return tuple(place for scope in functions for place in _groups_made(scope))[:MOST_PLACES]


def _new_groups_of_all(users: list[Any]) -> tuple[str, ...]:
    """The calls of ``new_group`` that are not for the members of a group alone."""
    entered = (scope_of(frame.f_code) for frame in main_thread_frames())
    scopes = (*(scope for scope in entered if scope.is_function), *scopes_in(users))
    calls = ((scope, call) for scope in scopes for call in scope.calls(["new_group"]))
    return first_places(scope.place(call.lineno) for scope, call in calls if not _is_of_members(call))


def _is_of_members(call: ast.Call) -> bool:
    """Whether its members alone make a group; a value that is not written out may say so."""
    given = [one for one in call.keywords if one.arg in ("use_local_synchronization", None)]
    return bool(given) and not all(is_constant(one.value, False) for one in given)


def _accumulates(scope: Scope) -> Iterator[str]:
    yield from scope.sets(["accumulate_grad_batches"])
    yield from (scope.place(call.lineno) for call in scope.calls(_UNREDUCED))


def _groups_made(scope: Scope) -> tuple[str, ...]:
    return scope.calls_under_condition("new_group")
