"""Says why multi-GPU training with PyTorch Lightning hangs: which rank, in which hook, at which line; what to do."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ncclsafe.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from lightning_ncclsafe.errors import DatasetMismatchError as DatasetMismatchError
    from lightning_ncclsafe.errors import HostPreflightError as HostPreflightError
    from lightning_ncclsafe.errors import PlannedStopError as PlannedStopError
    from lightning_ncclsafe.errors import UnevenDataError as UnevenDataError
    from lightning_ncclsafe.lightning import CollectiveTimer as CollectiveTimer
    from lightning_ncclsafe.lightning import DatasetAgreement as DatasetAgreement
    from lightning_ncclsafe.lightning import HostPreflight as HostPreflight
    from lightning_ncclsafe.lightning import JustInTimeCheckpoint as JustInTimeCheckpoint
    from lightning_ncclsafe.lightning import LoaderTuner as LoaderTuner
    from lightning_ncclsafe.lightning import LoggerOffload as LoggerOffload
    from lightning_ncclsafe.lightning import SafeDDP as SafeDDP
    from lightning_ncclsafe.lightning import SafeFSDP as SafeFSDP
    from lightning_ncclsafe.lightning import SafeModelParallel as SafeModelParallel
    from lightning_ncclsafe.lightning import safe_callbacks as safe_callbacks
    from lightning_ncclsafe.probes.trainer.actions import pause as pause
    from lightning_ncclsafe.settings import PhaseTimeouts as PhaseTimeouts

__version__ = "0.1.0"
__all__ = [
    "CollectiveTimeoutError",
    "CollectiveTimer",
    "DatasetAgreement",
    "DatasetMismatchError",
    "HostPreflight",
    "HostPreflightError",
    "JustInTimeCheckpoint",
    "LoaderTuner",
    "LoggerOffload",
    "PhaseTimeouts",
    "PlannedStopError",
    "SafeDDP",
    "SafeFSDP",
    "SafeModelParallel",
    "UnevenDataError",
    "pause",
    "safe_callbacks",
]

# Names that need no Lightning. All others exist twice, once for each of Lightning's packages.
_HOMES = {
    "CollectiveTimeoutError": "lightning_ncclsafe.errors",
    "DatasetMismatchError": "lightning_ncclsafe.errors",
    "HostPreflightError": "lightning_ncclsafe.errors",
    "PhaseTimeouts": "lightning_ncclsafe.settings",
    "PlannedStopError": "lightning_ncclsafe.errors",
    "UnevenDataError": "lightning_ncclsafe.errors",
    "pause": "lightning_ncclsafe.probes.trainer.actions",
}


# Public names are imported when they are asked for, so that reading and judging a report needs neither torch nor
# Lightning, which take seconds to import.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    from lightning_ncclsafe._lightning import chosen, module_for

    return getattr(import_module(module_for(chosen())), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


# A rank that prepares its data before it has a Trainer has no guard yet: its peers ask it for its stack by a signal.
# With NCCLSAFE set, Python itself imports this package, even in programs that never import Lightning; then the signal
# is set up when Lightning is imported.
if ("LOCAL_RANK" in os.environ or "SLURM_PROCID" in os.environ) and os.environ.get("NCCLSAFE", "") in ("", "0"):
    from lightning_ncclsafe.probes.process.traceback_signal import arm_early

    arm_early()

# Registers "ddp_ncclsafe" and the like with a Lightning that is imported already; with a later one, the first use of
# one of its classes does.
if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
    from lightning_ncclsafe._lightning import imported, module_for

    for _package in imported():
        import_module(module_for(_package))
