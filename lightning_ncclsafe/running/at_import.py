"""Waits for Lightning to be imported, and looks at each Trainer from then on; a program without Lightning is untouched.

Run as Python starts, in every process that has NCCLSAFE set: needs the standard library alone, and little of that.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


# Imported when there is something to look at: they know Lightning.
def _trainer_was_made(trainer: Any) -> None:
    from lightning_ncclsafe.running.guarding import guard_trainer

    guard_trainer(trainer)


def _fabric_was_made(_: Any) -> None:
    from lightning_ncclsafe.running.guarding import say_of_fabric

    say_of_fabric()


# Classes of Lightning by their modules, and what looks at each object of theirs.
_LOOKED_AT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "lightning.pytorch.trainer.trainer": ("Trainer", _trainer_was_made),
    "pytorch_lightning.trainer.trainer": ("Trainer", _trainer_was_made),
    "lightning.fabric.fabric": ("Fabric", _fabric_was_made),
    "lightning_fabric.fabric": ("Fabric", _fabric_was_made),
}


def begin() -> None:
    """From now on, what Lightning is asked to train with is looked at; once is enough."""
    if any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Waiting())
    for name in _LOOKED_AT:
        # Something else that Python runs as it starts may have imported it.
        if name in sys.modules:
            _look_at(sys.modules[name])


class _Waiting:
    """Among Python's finders of modules: finds nothing itself, and sees when Lightning's modules are found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None, but for Lightning's: what the other finders say of them."""
        if name not in _LOOKED_AT:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                with suppress(AttributeError):  # of a loader that is like no other
                    _look_at_what_loads(spec.loader)
                return spec
        return None


def _look_at_what_loads(loader: Any) -> None:
    """Has the next module that a loader loads looked at; loaders are made for one module each."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        try:
            original(module)
        except BaseException as error:
            _leave_out_this_frame(error)
            raise
        _look_at(module)

    loader.exec_module = exec_module


def _look_at(module: ModuleType) -> None:
    name, look_at = _LOOKED_AT[module.__name__]
    kind = getattr(module, name, None)
    if kind is None:
        return
    original = kind.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            _leave_out_this_frame(error)
            raise
        try:
            look_at(self)
        except Exception as error:  # of an installation that is broken; training goes on
            with suppress(Exception):
                sys.stderr.write(f"[ncclsafe] the guard failed and is off; training continues: {error!r}\n")

    kind.__init__ = __init__
    # As the import of this package does in a program that knows of it.
    from lightning_ncclsafe.probes.process.traceback_signal import arm_early

    arm_early()


def _leave_out_this_frame(error: BaseException) -> None:
    """What has been raised has the frames that it would have without us; Python 3.10 puts the caller's back."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
