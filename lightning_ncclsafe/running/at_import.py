"""Waits for Lightning to be imported, then passes each new Trainer to ``guarding``; other programs are untouched.

Run as Python starts, in every process that has NCCLSAFE set: needs the standard library alone, and little of that.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


# Imported late: these know Lightning.
def _on_trainer(trainer: Any) -> None:
    from lightning_ncclsafe.running.guarding import guard_trainer

    guard_trainer(trainer)


def _on_fabric(_: Any) -> None:
    from lightning_ncclsafe.running.guarding import say_of_fabric

    say_of_fabric()


# Classes of Lightning by their modules, and what is called with each new object of theirs.
_ON_NEW: dict[str, tuple[str, Callable[[Any], None]]] = {
    "lightning.pytorch.trainer.trainer": ("Trainer", _on_trainer),
    "pytorch_lightning.trainer.trainer": ("Trainer", _on_trainer),
    "lightning.fabric.fabric": ("Fabric", _on_fabric),
    "lightning_fabric.fabric": ("Fabric", _on_fabric),
}


def begin() -> None:
    """Begins to wait for Lightning; a second call does nothing."""
    if any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Waiting())
    for name in _ON_NEW:
        # Something else that Python runs as it starts may have imported it.
        if name in sys.modules:
            _watch_class(sys.modules[name])


class _Waiting:
    """One of Python's finders of modules, which finds nothing itself, but sees when Lightning's modules are found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The other finders' result for Lightning's modules; None for all others."""
        if name not in _ON_NEW:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                with suppress(AttributeError):  # an unusual loader
                    _watch_loader(spec.loader)
                return spec
        return None


def _watch_loader(loader: Any) -> None:
    """Watches the class in the module that a loader loads next; loaders are made for one module each."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        try:
            original(module)
        except BaseException as error:
            _leave_out_this_frame(error)
            raise
        _watch_class(module)

    loader.exec_module = exec_module


def _watch_class(module: ModuleType) -> None:
    name, on_new = _ON_NEW[module.__name__]
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
            on_new(self)
        except Exception as error:  # a broken installation; training continues
            with suppress(Exception):
                sys.stderr.write(f"[ncclsafe] the guard failed and is off; training continues: {error!r}\n")

    kind.__init__ = __init__
    # A program that imports this package itself gets that then.
    from lightning_ncclsafe.probes.process.traceback_signal import arm_early

    arm_early()


def _leave_out_this_frame(error: BaseException) -> None:
    """Gives an exception the frames that it would have without us; Python 3.10 adds the caller's again."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
