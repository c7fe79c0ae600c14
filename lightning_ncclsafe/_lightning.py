"""Lightning under its two names: which of them a class is of, and which is meant where nothing says so.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of the same code: a Trainer of the one takes no strategy
of the other. What Lightning has to know as its own, we have once for each: in ``lightning_ncclsafe.lightning`` and
``lightning_ncclsafe.pytorch_lightning``. All other code serves both, imports neither, and asks here.
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
"""Says which of them is meant, in programs that do not: ``lightning`` or ``pytorch_lightning``."""

# Of either of them, as what is given to a hook is of the package whose Trainer calls it.
LightningModule: TypeAlias = Any
Logger: TypeAlias = Any
Trainer: TypeAlias = Any

# Where either of them has what is asked for by name.
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
    """Those of Lightning's packages that the program has imported."""
    # Some programs let the one name stand for the other, or for nothing; that is seen by what it was imported as.
    specs = {name: getattr(sys.modules.get(name), "__spec__", None) for name in names}
    return [name for name, spec in specs.items() if getattr(spec, "name", None) == name]


def module_for(package: str) -> str:
    """The module of ours that has the classes for a package of Lightning."""
    return f"lightning_ncclsafe.{package.partition('.')[0]}"


def import_lightning(names: Sequence[str] = NAMES, wanted: str = "") -> ModuleType:
    """Imports the one of Lightning's packages that is to be used.

    Args:
        names: Of the packages, the preferred one first.
        wanted: The one that the user has named, without what follows a dot; empty for the one that is imported
            already, or else is installed.

    Raises:
        ImportError: If none of them is installed, or not the wanted one.
        ValueError: If there is none of that name.
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
            # Anything else that is missing, is missing from an installed Lightning, which says so best itself.
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
    """The package that is meant by ``from lightning_ncclsafe import SafeDDP``; the same for the rest of the program."""
    return import_lightning(wanted=os.environ.get(VARIABLE, "")).__name__


def package_of(kind: type, part: str = "") -> str:
    """The package of Lightning that a class is of, or derived from; empty if it is of none.

    Args:
        kind: The class.
        part: Of the package, the part that counts; all of it by default.
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
    """Classes of Lightning by their names, of each of its packages that the program has imported."""
    return tuple(lightnings(package, name) for package in imported() for name in names)


def refuse_other_trainer(part: object, trainer: object) -> None:
    """Raises if a part of ours was given to a Trainer of the other Lightning.

    Args:
        part: A strategy or callback of this package.
        trainer: What runs it.

    Raises:
        TypeError: Naming both, and the line to write.
    """
    _refuse_other(part, package_of(type(trainer), "trainer."))


def refuse_other_caller(part: object, module: str) -> None:
    """The same, by the name of a module that deals with the part.

    Raises:
        TypeError: If the module belongs to the Trainer of the other Lightning.
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
    """Raises if a Trainer has several callbacks for one thing: only one of them could be followed.

    Args:
        kind: What such callbacks are derived from.
        trainer: What has the callbacks.

    Raises:
        ValueError: Naming the class.
    """
    found = [callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, kind)]
    if len(found) > 1:
        count = "two" if len(found) == 2 else len(found)
        raise ValueError(f"This Trainer has {count} {_public(type(found[0])).__name__} callbacks; pass only one.")


def _public(kind: type) -> type:
    """The class of ours that a class is, or is derived from."""
    ours = [module_for(name) for name in NAMES]
    return next((base for base in kind.__mro__ if base.__module__ in ours), kind)


def save_hparams_to_yaml(path: str, hparams: Any) -> None:
    """Lightning's own, which is the same in both packages."""
    lightnings(imported()[0], "save_hparams_to_yaml")(path, hparams)


class _OfEither(type):
    """Makes classes that stand for those of the same name in both packages, where ``isinstance`` is asked."""

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
