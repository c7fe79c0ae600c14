"""Adds the guard to the strategy of a Trainer that was made without it; others run unchanged, and one line says so.

The strategy object stays the same, with all its attributes, and gets a class of the same name, derived from its own:
code that keeps the object, asks for its class or overrides its methods works as without the guard.
"""

import os
from abc import ABCMeta
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from importlib import import_module
from types import new_class
from typing import Any, ClassVar, SupportsIndex

from lightning_ncclsafe._lightning import NAMES, module_for, package_of, rank_zero_only
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.running.variables import RECOMMENDED, WantedCallback, shown, wanted
from lightning_ncclsafe.strategies.guarded import GuardedStrategy, guards
from lightning_ncclsafe.strategies.launchers import guarded, is_lightnings

# Lightning's strategies that can be guarded; whether ranks need one another for a forward pass with each.
_GUARDABLE = {"DDPStrategy": False, "FSDPStrategy": True, "ModelParallelStrategy": True}

_LIGHTNINGS = tuple(f"{name}.strategies." for name in NAMES)
# A program may make any number of Trainers.
_printed: set[str] = set()


class Unguarded(Exception):
    """Why a strategy runs without the guard."""


def guard_trainer(trainer: Any) -> None:
    """Adds the guard to the strategy of a Trainer, and the callbacks that the environment asks for to the Trainer."""
    try:
        asked = wanted(os.environ)
        if not guards(trainer.strategy):
            _guard(trainer.strategy, **asked.guard)
    except (Unguarded, ValueError) as why_not:
        _say_once(f"this Trainer runs without the guard: {why_not}")
        return
    except Exception as error:  # training continues
        say_own_failure(error)
        return
    try:
        made = _made(asked.callbacks, package_of(type(trainer), "trainer."))
    except Exception as error:  # arguments that the class does not take, for instance
        _say_once(f"no callback was added to the Trainer: {error}")
    else:
        own: list[Any] = trainer.callbacks
        trainer.callbacks = [
            *(callback for callback in made if not any(isinstance(each, type(callback)) for each in own)),
            *own,
        ]


def say_of_fabric() -> None:
    """Fabric has no Trainer that could be watched."""
    _say_once("Fabric runs without the guard, which supports Trainers only")


def _say_once(text: str) -> None:
    if text not in _printed and not getattr(rank_zero_only, "rank", 0):
        say_on_stderr(text)
    _printed.add(text)


def _guard(strategy: Any, *, timeout: float | None = None, **arguments: Any) -> None:
    """Adds the guard to a strategy, or leaves the strategy as it was.

    Raises:
        Unguarded: The strategy does not support it.
        ValueError: The arguments are invalid for this strategy.
    """
    kind: type = type(strategy)
    guarded_kind = guarded_class(kind)
    if not is_lightnings(strategy.launcher):
        raise Unguarded(f"the ranks of {kind.__name__} are started by {type(strategy.launcher).__name__}")
    before = dict(vars(strategy))
    try:
        if timeout is not None:
            strategy._timeout = timedelta(seconds=timeout)
        strategy.__class__ = guarded_kind
        strategy.take_guard(**arguments)
        strategy._launcher = guarded(strategy._launcher)
    except BaseException:
        strategy.__class__ = kind
        vars(strategy).clear()
        vars(strategy).update(before)
        raise


@cache
def guarded_class(kind: type) -> type:
    """The guarded class of a strategy's class; always the same for the same class.

    Raises:
        Unguarded: The class is none of those that can be guarded, nor derived from one.
    """
    base = next((one.__name__ for one in kind.__mro__ if one.__module__.startswith(_LIGHTNINGS)), "")
    if base.startswith("SingleDevice"):
        raise Unguarded("it trains on one device, so no rank waits for another")
    if base not in _GUARDABLE:
        able = " and ".join(_GUARDABLE).replace(" and ", ", ", 1)
        raise Unguarded(f"{kind.__name__} is not supported, only {able} and their subclasses are")
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**named, "forward_communicates": _GUARDABLE[base], "_class_before": kind}
    return new_class(
        kind.__name__, (kind, _GuardedInPlace), {"metaclass": _GuardFirst}, lambda space: space.update(body)
    )


class _GuardFirst(ABCMeta):
    """Puts our methods first, although the class before is the first base, as it decides the memory layout."""

    def mro(cls) -> list[type]:
        own, *others = super().mro()
        ours = [kind for kind in others if issubclass(kind, GuardedStrategy)]
        return [own, *ours, *(kind for kind in others if kind not in ours)]


class _GuardedInPlace(GuardedStrategy):
    """A guarded strategy with the name of the class that it had before."""

    _class_before: ClassVar[type]
    # The environment variable may be missing on some ranks.
    is_on_all_ranks = False

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # Spawned ranks, and copies, create the class again from the class before.
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or reduced[1][:1] != (type(self),):
            return reduced
        return _empty, (self._class_before,), *reduced[2:]


def _empty(kind: type) -> Any:
    return object.__new__(guarded_class(kind))


def _made(asked: Sequence[WantedCallback], package: str) -> list[Any]:
    """The requested callbacks, of one of Lightning's packages."""
    named = [_callback(one, package) for one in asked if one.name != RECOMMENDED]
    if len(named) == len(asked):
        return named
    made: list[Any] = import_module(module_for(package)).safe_callbacks(*named)
    return made


def _callback(asked: WantedCallback, package: str) -> Any:
    module, _, name = asked.name.rpartition(".")
    kind = getattr(import_module(module or module_for(package)), name, None)
    if not isinstance(kind, type) or not issubclass(kind, import_module(package).Callback):
        raise TypeError(f"{shown(asked.name)} is not a Callback of {package}")
    return kind(**asked.arguments)
