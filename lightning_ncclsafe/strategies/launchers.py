"""Lightning's launchers, made to guard the Trainer's function in every process in which they call it."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from lightning_ncclsafe._lightning import known
from lightning_ncclsafe.checkpoints.saving import is_saving
from lightning_ncclsafe.exchange import wait_for

EXPLAIN_S = 6.0
"""Seconds that ranks have to report why one of them has ended: a report about a dead rank takes one second, a report
that has to wait for another silent rank takes four."""

# The longest wait for a checkpoint then.
_SAVES_S = 15.0
# The method with which Lightning's observer thread kills all launched ranks.
_END_ALL = "_terminate_all"


@runtime_checkable
class Watching(Protocol):
    """A strategy that watches the calls of its Trainer."""

    def watch(self, trainer: Any) -> AbstractContextManager[None]:
        """Watches one call of ``fit``, ``validate``, ``test`` or ``predict`` in this process."""


def guarded(launcher: Any) -> Any:
    """The same launcher, guarded; a new one if there is none; a launcher that is not Lightning's is left as it is.

    DDP always has one. The other strategies have none if the processes are created elsewhere, for instance by torchrun:
    their Trainer then calls its functions itself, and no hook marks their beginning and end.
    """
    if launcher is None:
        return _GuardedCallLauncher()
    if is_lightnings(launcher):
        vars(launcher)["launch"] = partial(_launch, launcher)
    return launcher


def is_lightnings(launcher: Any) -> bool:
    """Whether calls of a strategy with this launcher can be watched."""
    return launcher is None or type(launcher) in known("_SubprocessScriptLauncher", "_MultiProcessingLauncher")


def _launch(launcher: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return type(launcher).launch(launcher, _GuardedFunction(function), *args, **kwargs)


def _let_the_others_explain() -> None:
    """Delays how Lightning's launcher, on finding an ended rank, kills all others, so that they can report first."""
    for thread in threading.enumerate():
        end_all = getattr(thread, _END_ALL, None)
        if end_all is not None and _END_ALL not in vars(thread):
            vars(thread)[_END_ALL] = partial(_later, end_all)


def _later(end_all: Callable[[], None]) -> None:
    time.sleep(EXPLAIN_S)
    wait_for(lambda: not is_saving(), deadline_s=_SAVES_S)
    end_all()


@dataclass(frozen=True)
class _GuardedFunction:
    """A Trainer's function, guarded where it runs; a class, so that it can be sent to a spawned process."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trainer = getattr(self.function, "__self__", None)
        strategy = getattr(trainer, "strategy", None)
        if not isinstance(strategy, Watching):
            return self.function(*args, **kwargs)
        _let_the_others_explain()
        with strategy.watch(trainer):
            return self.function(*args, **kwargs)


class _GuardedCallLauncher:
    """Only calls the function, as a Trainer without a launcher does."""

    is_interactive_compatible = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return _GuardedFunction(function)(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Does nothing: it has started no process."""
