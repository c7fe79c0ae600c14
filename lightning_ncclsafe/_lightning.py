"""Lightning, under the one of its two names that the program uses; whoever needs a class of it imports it from here.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of the same code: a Trainer of the one takes no strategy
of the other. Chosen is, once, the one that the program has imported already; of both, or if there is none yet,
``lightning.pytorch`` if it is installed.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

NAMES = ("lightning.pytorch", "pytorch_lightning")

# Where in the package the names are that stand at the end of this module.
_HOMES = {
    "": ("Callback", "LightningModule", "Trainer"),
    ".core.saving": ("save_hparams_to_yaml",),
    ".loggers": ("CometLogger", "CSVLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
    ".loggers.csv_logs": ("ExperimentWriter",),
    ".loggers.logger": ("DummyLogger",),
    ".plugins.io": ("TorchCheckpointIO",),
    ".strategies": ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "ParallelStrategy", "StrategyRegistry"),
    ".strategies.launchers": ("_MultiProcessingLauncher", "_SubprocessScriptLauncher"),
    ".strategies.launchers.launcher": ("_Launcher",),
    ".utilities": ("rank_zero_only",),
    ".utilities.combined_loader": ("CombinedLoader",),
    ".utilities.exceptions": ("SIGTERMException",),
    ".utilities.types": ("STEP_OUTPUT",),
}


def import_lightning(names: Sequence[str] = NAMES) -> ModuleType:
    """Imports the one of Lightning's packages that is to be used.

    Args:
        names: Of the packages, the preferred one first.

    Raises:
        ImportError: If none of them is installed.
    """
    # Those that are imported come first, each in the order given.
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            # Anything else that is missing, is missing from an installed Lightning, which says so best itself.
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError(
        f"lightning_ncclsafe is a plugin of PyTorch Lightning, but neither {' nor '.join(names)} is installed: "
        "pip install lightning"
    )


CHOSEN = import_lightning().__name__
(_OTHER,) = (name for name in NAMES if name != CHOSEN)


def refuse_other_trainer(part: object, trainer: object) -> None:
    """Raises if a part of ours was given to a Trainer of the Lightning that was not chosen.

    Args:
        part: A callback of this package.
        trainer: What runs it.

    Raises:
        TypeError: Naming both, and what to import.
    """
    for base in type(trainer).__mro__:
        refuse_other_caller(part, base.__module__)


def refuse_second(kind: type, trainer: object) -> None:
    """Raises if a Trainer has several callbacks of one class: only one of them could be followed.

    Args:
        kind: The class; one that is derived from it counts, too.
        trainer: What has the callbacks.

    Raises:
        ValueError: Naming the class.
    """
    count = sum(isinstance(callback, kind) for callback in getattr(trainer, "callbacks", ()))
    if count > 1:
        raise ValueError(f"This Trainer has {'two' if count == 2 else count} {kind.__name__} callbacks; give it one.")


def refuse_other_caller(part: object, module: str) -> None:
    """The same, by the name of a module that deals with the part.

    Raises:
        TypeError: If the module belongs to the Trainer of the Lightning that was not chosen.
    """
    if f"{module}.".startswith(f"{_OTHER}.trainer."):
        raise TypeError(
            f"{type(part).__name__} is made for a Trainer of {CHOSEN}, but was given to one of {_OTHER}: these are two "
            f"packages, whose classes do not fit together. Import everything from {CHOSEN}, nothing from {_OTHER}; or, "
            f"to keep {_OTHER}, import it before lightning_ncclsafe, and nothing from {CHOSEN}."
        )


if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch.core.saving import save_hparams_to_yaml as save_hparams_to_yaml
    from lightning.pytorch.loggers import CometLogger as CometLogger
    from lightning.pytorch.loggers import CSVLogger as CSVLogger
    from lightning.pytorch.loggers import Logger as Logger
    from lightning.pytorch.loggers import MLFlowLogger as MLFlowLogger
    from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
    from lightning.pytorch.loggers import WandbLogger as WandbLogger
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter as ExperimentWriter
    from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
    from lightning.pytorch.plugins.io import TorchCheckpointIO as TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
    from lightning.pytorch.strategies import FSDPStrategy as FSDPStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
    from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
    from lightning.pytorch.strategies import StrategyRegistry as StrategyRegistry
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _MultiProcessingLauncher
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _SubprocessScriptLauncher
    from lightning.pytorch.strategies.launchers.launcher import _Launcher as _Launcher
    from lightning.pytorch.utilities import rank_zero_only as rank_zero_only
    from lightning.pytorch.utilities.combined_loader import CombinedLoader as CombinedLoader
    from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException
    from lightning.pytorch.utilities.types import STEP_OUTPUT as STEP_OUTPUT
else:
    for _module, _names in _HOMES.items():
        globals().update({name: getattr(import_module(f"{CHOSEN}{_module}"), name) for name in _names})
