"""What Lightning is doing on this rank, from the names it gives its profiler and its barriers."""

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from functools import partial
from inspect import unwrap
from threading import get_ident
from time import monotonic
from typing import Any
from weakref import WeakSet

from lightning_ncclsafe.code.libraries import PROFILE, START_OF_NO_PROFILER, Code
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.facts import Action
from lightning_ncclsafe.rules.kit.activity import PAUSE

SAVE = "save_checkpoint"
"""Lightning's name of the action in which the Trainer saves a checkpoint."""

# The trackers of this process that listen to a Trainer now, on any thread.
_attached: "WeakSet[ActionTracker]" = WeakSet()

# The methods of a profiler that are replaced.
_REPLACED = ("start", "stop", "profile")


class ActionTracker:
    """Keeps the stack of the main thread's actions.

    Written by the training's main thread on every hook, so it does next to nothing; read by others at any time.
    """

    def __init__(self) -> None:
        self._thread = get_ident()
        self._open: list[tuple[str, float]] = []
        self._profiler: Any = None
        self._before: dict[str, Any] = {}
        self.transitions = 0
        """Counts actions begun and ended: it moves as long as the Trainer does."""
        self.last_action = ""
        """Name of the action that ended last."""
        self.on_failed: Callable[[str, BaseException], None] | None = None
        """Called on the main thread with the name of an action and what it raises, which may yet be caught."""
        self.listeners: tuple[Callable[[str], None], ...] = ()
        """Called on the main thread, some 50 times a step, with the innermost action whenever that changes: its name,
        or an empty one between actions."""

    def __reduce__(self) -> Any:
        # The copy of a Trainer that runs, or of its profiler, is in no call.
        return ActionTracker, ()

    def enter(self, name: str) -> None:
        """An action begins."""
        if get_ident() == self._thread:
            self._open.append((name, monotonic()))
            self.transitions += 1
            for listen in self.listeners:
                listen(name)

    def leave(self, name: str) -> None:
        """An action ends, and with it any within it that an exception left without notice."""
        if get_ident() != self._thread:
            return
        if self._open and self._open[-1][0] == name:
            self._open.pop()
        else:
            self._leave_with_inner(name)
        self.last_action = name
        self.transitions += 1
        for listen in self.listeners:
            listen(self._open[-1][0] if self._open else "")

    def _leave_with_inner(self, name: str) -> None:
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == name:
                del self._open[index:]
                break

    def failed(self, name: str, error: BaseException) -> None:
        """An action has ended with an exception."""
        if self.on_failed is not None and get_ident() == self._thread:
            self.on_failed(name, error)

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """An action for the length of a ``with`` block."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def is_in(self, name: str) -> bool:
        """Whether an action whose name starts with this is active; for the main thread."""
        return any(begun.startswith(name) for begun, _ in self._open)

    def actions(self) -> tuple[Action, ...]:
        """The active actions, outermost first."""
        now = monotonic()
        return tuple(Action(name=name, for_s=round(now - since, 3)) for name, since in [*self._open])

    def attach(self, profiler: Any) -> None:
        """Listens to a Lightning profiler; its own ``start`` and ``stop`` are still called.

        Lightning wraps every hook, data fetch and checkpoint save in ``profiler.profile(name)``.
        """
        _attached.add(self)
        self._profiler = profiler
        self._before = {name: vars(profiler)[name] for name in _REPLACED if name in vars(profiler)}
        if _is_in(PROFILE, type(profiler).profile) and "profile" not in self._before:
            # Lightning's own method, which only calls start and stop, and is called some 25 times a step, so every
            # inner call counts: otherwise, 3 % of a step of 3 ms. Its default profiler has an empty start and stop.
            if _is_in(START_OF_NO_PROFILER, type(profiler).start) and not self._before:
                profiler.profile = partial(_TrackedAction, self)
            else:
                profiler.profile = partial(_TrackedProfile, self, profiler.start, profiler.stop)
        profiler.start = _Listener(self.enter, profiler.start)
        profiler.stop = _Listener(self.leave, profiler.stop)

    def detach(self) -> None:
        """Stops listening and restores the profiler."""
        _attached.discard(self)
        if self._profiler is not None:
            for name in _REPLACED:
                vars(self._profiler).pop(name, None)
            vars(self._profiler).update(self._before)
            self._profiler = None


def _is_in(known: Code, function: Any) -> bool:
    code = getattr(unwrap(function), "__code__", None)
    return code is not None and known.has(code.co_filename, code.co_name)


class _Listener:
    """Calls two functions. A class and not a closure, so that a profiler that holds it can be copied."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Any, second: Any) -> None:
        self._first = first
        self._second = second

    def __call__(self, action_name: str) -> None:
        self._first(action_name)
        self._second(action_name)


@marked(Mark.LISTENER)
class _TrackedAction(ContextDecorator):
    """The context manager of ``Profiler.profile`` for a profiler that does nothing: only tracks the action.

    Like Lightning's it can decorate a function; it has no state that nested uses could disturb.
    """

    __slots__ = ("_name", "_tracker")

    def __init__(self, tracker: ActionTracker, action_name: str) -> None:
        self._tracker = tracker
        self._name = action_name

    def __enter__(self) -> str:
        self._tracker.enter(self._name)
        return self._name

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self._tracker.leave(self._name)
        if error is not None:
            self._tracker.failed(self._name, error)


@marked(Mark.LISTENER)
class _TrackedProfile(_TrackedAction):
    """The same for a profiler that does something. Faster than a generator, even with both."""

    __slots__ = ("_start", "_stop")

    def __init__(
        self, tracker: ActionTracker, start: Callable[[str], None], stop: Callable[[str], None], action_name: str
    ) -> None:
        super().__init__(tracker, action_name)
        self._start = start
        self._stop = stop

    def __enter__(self) -> str:
        super().__enter__()
        self._start(self._name)
        return self._name

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        super().__exit__(_type, error, _trace)
        self._stop(self._name)


@contextmanager
def pause(reason: str = "") -> Iterator[None]:
    """Announces that this rank pauses on purpose: in a debugger, at a prompt, while it waits for a person.

    During the ``with`` block, the other ranks wait without a report. The hard limit of the phase (the strategy's
    ``timeout`` or ``PhaseTimeouts``) still ends the run. Outside of a Trainer's function with a strategy of this
    package, it does nothing.

    Args:
        reason: The reason, in a few words; the report quotes it if the hard limit passes.

    Example::

        if self.global_rank == 0:
            with lightning_ncclsafe.pause("a debugger"):
                breakpoint()
    """
    with ExitStack() as stack:
        # They ignore actions on threads other than their own.
        for tracker in [*_attached]:
            stack.enter_context(tracker.action(f"{PAUSE}{reason}"))
        yield
