"""Says why multi-GPU training with PyTorch Lightning hangs: which rank, in which hook, at which line; what to do."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ncclsafe.callbacks.collective_timer import CollectiveTimer as CollectiveTimer
    from lightning_ncclsafe.callbacks.dataset_agreement import DatasetAgreement as DatasetAgreement
    from lightning_ncclsafe.callbacks.host_preflight import HostPreflight as HostPreflight
    from lightning_ncclsafe.callbacks.loader_tuner import LoaderTuner as LoaderTuner
    from lightning_ncclsafe.callbacks.logger_offload import LoggerOffload as LoggerOffload
    from lightning_ncclsafe.callbacks.recommended import safe_callbacks as safe_callbacks
    from lightning_ncclsafe.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from lightning_ncclsafe.errors import DatasetMismatchError as DatasetMismatchError
    from lightning_ncclsafe.errors import HostPreflightError as HostPreflightError
    from lightning_ncclsafe.errors import UnevenDataError as UnevenDataError
    from lightning_ncclsafe.pauses import pause as pause
    from lightning_ncclsafe.phase_timeouts import PhaseTimeouts as PhaseTimeouts
    from lightning_ncclsafe.strategies import SafeDDP as SafeDDP
    from lightning_ncclsafe.strategies import SafeFSDP as SafeFSDP
    from lightning_ncclsafe.strategies import SafeModelParallel as SafeModelParallel

__version__ = "0.1.0.dev0"
__all__ = [
    "CollectiveTimeoutError",
    "CollectiveTimer",
    "DatasetAgreement",
    "DatasetMismatchError",
    "HostPreflight",
    "HostPreflightError",
    "LoaderTuner",
    "LoggerOffload",
    "PhaseTimeouts",
    "SafeDDP",
    "SafeFSDP",
    "SafeModelParallel",
    "UnevenDataError",
    "pause",
    "safe_callbacks",
]

_HOMES = {
    "CollectiveTimer": "lightning_ncclsafe.callbacks.collective_timer",
    "CollectiveTimeoutError": "lightning_ncclsafe.errors",
    "DatasetAgreement": "lightning_ncclsafe.callbacks.dataset_agreement",
    "DatasetMismatchError": "lightning_ncclsafe.errors",
    "HostPreflight": "lightning_ncclsafe.callbacks.host_preflight",
    "HostPreflightError": "lightning_ncclsafe.errors",
    "LoaderTuner": "lightning_ncclsafe.callbacks.loader_tuner",
    "LoggerOffload": "lightning_ncclsafe.callbacks.logger_offload",
    "PhaseTimeouts": "lightning_ncclsafe.phase_timeouts",
    "SafeDDP": "lightning_ncclsafe.strategies",
    "SafeFSDP": "lightning_ncclsafe.strategies",
    "SafeModelParallel": "lightning_ncclsafe.strategies",
    "UnevenDataError": "lightning_ncclsafe.errors",
    "pause": "lightning_ncclsafe.pauses",
    "safe_callbacks": "lightning_ncclsafe.callbacks.recommended",
}


# Public names are imported when they are asked for, so that reading and judging a report needs neither torch nor
# Lightning, which take seconds to import.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


# A rank that prepares its data before it has a Trainer has no guard yet: its peers ask it for its stack by a signal.
if "LOCAL_RANK" in os.environ or "SLURM_PROCID" in os.environ:
    from lightning_ncclsafe.probes.traceback_signal import arm_early

    arm_early()

# Makes "ddp_ncclsafe" and its like known to a Lightning that is there already; to a later one, their first use does.
if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
    import lightning_ncclsafe.strategies  # noqa: F401
