"""Lightning's two packages: which of them defines a class, and which one a program means that imports neither.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of the same code: a Trainer of one takes no strategy of
the other. So classes that derive from Lightning's exist twice, in ``lightning_ncclsafe.lightning`` and
``lightning_ncclsafe.pytorch_lightning``. All other code serves both packages, imports neither, and asks this module.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only

NAMES = ("lightning.pytorch", "pytorch_lightning")
VARIABLE = "NCCLSAFE_LIGHTNING"
"""Environment variable that chooses the package in programs that do not: ``lightning`` or ``pytorch_lightning``."""

# Of either package: a hook is given objects of the package whose Trainer calls it.
LightningModule: TypeAlias = Any
Logger: TypeAlias = Any
Trainer: TypeAlias = Any

# Modules by the names that are looked up in them, the same in both packages.
_HOMES = {
    "CombinedLoader": ".utilities.combined_loader",
    "CometLogger": ".loggers",
    "CSVLogger": ".loggers",
    "DummyLogger": ".loggers.logger",
    "ExperimentWriter": ".loggers.csv_logs",
    "MLFlowLogger": ".loggers",
    "ModelCheckpoint": ".callbacks",
    "OnExceptionCheckpoint": ".callbacks",
    "SIGTERMException": ".utilities.exceptions",
    "TensorBoardLogger": ".loggers",
    "TorchCheckpointIO": ".plugins.io",
    "WandbLogger": ".loggers",
    "_MultiProcessingLauncher": ".strategies.launchers",
    "_SubprocessScriptLauncher": ".strategies.launchers",
    "save_hparams_to_yaml": ".core.saving",
}


def imported(names: Sequence[str] = NAMES) -> list[str]:
    """Lightning's packages that the program has imported."""
    # Some programs alias one name to the other, or to None; the spec shows that.
    specs = {name: getattr(sys.modules.get(name), "__spec__", None) for name in names}
    return [name for name, spec in specs.items() if getattr(spec, "name", None) == name]


def module_for(package: str) -> str:
    """The module of this package with the classes for a package of Lightning."""
    return f"lightning_ncclsafe.{package.partition('.')[0]}"


def import_lightning(names: Sequence[str] = NAMES, wanted: str = "") -> ModuleType:
    """Imports one of Lightning's packages.

    Args:
        names: The packages, the preferred one first.
        wanted: The user's choice, ``lightning`` or ``pytorch_lightning``; empty for a package that is imported
            already, or else for one that is installed.

    Raises:
        ImportError: If none of the packages is installed, or the wanted one is not.
        ValueError: If no package has the wanted name.
    """
    if wanted:
        by_name = {name.partition(".")[0]: name for name in names}
        if wanted not in by_name:
            allowed = " or ".join(map(repr, by_name))
            raise ValueError(f"{VARIABLE}={wanted!r} in the environment is unknown; it must be {allowed}.")
        names = [by_name[wanted]]
    # Those that are imported come first, each in the order given.
    there = imported(names)
    for name in sorted(names, key=lambda name: name not in there):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            # Lightning is installed, but lacks a module that it needs itself: its own error says that best.
            if error.name not in (name, name.partition(".")[0]):
                raise
    if wanted:
        raise ImportError(
            f"{VARIABLE}={wanted!r} in the environment names a package that is not installed: {names[0]}."
        )
    raise ImportError(
        f"lightning_ncclsafe is a plugin of PyTorch Lightning, but neither {' nor '.join(names)} is installed: "
        "pip install lightning"
    )


@cache
def chosen() -> str:
    """The package whose class ``from lightning_ncclsafe import SafeDDP`` imports; the same for the whole program."""
    return import_lightning(wanted=os.environ.get(VARIABLE, "")).__name__


def package_of(kind: type, part: str = "") -> str:
    """The package of Lightning that defines a class or one of its bases; empty if none does.

    Args:
        kind: The class.
        part: Only definitions in this subpackage count, for instance ``"trainer."``; all by default.
    """
    for base in kind.__mro__:
        for name in NAMES:
            if f"{base.__module__}.".startswith(f"{name}.{part}"):
                return name
    return ""


def lightnings(package: str, name: str) -> Any:
    """A class or function of one of Lightning's packages, by its name."""
    return getattr(import_module(f"{package}{_HOMES[name]}"), name)


def known(*names: str) -> tuple[type, ...]:
    """Classes of Lightning by name, of each of its packages that the program has imported."""
    return tuple(lightnings(package, name) for package in imported() for name in names)


def refuse_other_trainer(part: object, trainer: object) -> None:
    """Raises if a strategy or callback was given to a Trainer of Lightning's other package.

    Args:
        part: The strategy or callback.
        trainer: The Trainer.

    Raises:
        TypeError: Naming both packages, and the line to write.
    """
    _refuse_other(part, package_of(type(trainer), "trainer."))


def refuse_other_caller(part: object, module: str) -> None:
    """Raises if a module of the other package's Trainer uses a strategy or callback.

    Args:
        part: The strategy or callback.
        module: Name of the module.

    Raises:
        TypeError: As :func:`refuse_other_trainer`.
    """
    _refuse_other(part, next((name for name in NAMES if f"{module}.".startswith(f"{name}.trainer.")), ""))


def _refuse_other(part: object, package: str) -> None:
    own = package_of(type(part))
    if not own or not package or own == package:
        return
    line = f"from {module_for(package)} import {_public(type(part)).__name__}"
    raise TypeError(
        f"{type(part).__name__} is for a Trainer of {own}, but was given to one of {package}: these are two "
        f"packages, whose classes do not fit together. Write: {line} (in a program that you cannot edit, set "
        f"{VARIABLE}={package.partition('.')[0]} in its environment)."
    )


def refuse_second(kind: type, trainer: object) -> None:
    """Raises if a Trainer has several callbacks of one kind, as only one of them could be followed.

    Args:
        kind: The base class of such callbacks.
        trainer: The Trainer.

    Raises:
        ValueError: Naming the class.
    """
    found = [callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, kind)]
    if len(found) > 1:
        count = "two" if len(found) == 2 else len(found)
        raise ValueError(f"This Trainer has {count} {_public(type(found[0])).__name__} callbacks; pass only one.")


def _public(kind: type) -> type:
    """The public class of this package that a class is, or derives from."""
    ours = [module_for(name) for name in NAMES]
    return next((base for base in kind.__mro__ if base.__module__ in ours), kind)


def save_hparams_to_yaml(path: str, hparams: Any) -> None:
    """Lightning's own, which is the same in both packages."""
    lightnings(imported()[0], "save_hparams_to_yaml")(path, hparams)


class _OfEither(type):
    """Makes classes that stand for those of the same name in both packages, in ``isinstance`` and ``issubclass``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, known(cls.__name__))

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, known(cls.__name__))


if TYPE_CHECKING:
    from lightning.pytorch.loggers import CometLogger as CometLogger
    from lightning.pytorch.loggers import CSVLogger as CSVLogger
    from lightning.pytorch.loggers import MLFlowLogger as MLFlowLogger
    from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
    from lightning.pytorch.loggers import WandbLogger as WandbLogger
    from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
else:
    for _name in ("CometLogger", "CSVLogger", "DummyLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"):
        globals()[_name] = _OfEither(_name, (), {})
