"""Frames that tell by file and function what a stack is about: a collective, the store, a loader, a logger, a save."""

import re
from dataclasses import dataclass
from functools import lru_cache

from lightning_ncclsafe.facts import Frame


@dataclass(frozen=True, slots=True)
class Landmark:
    """What a frame says about everything below it.

    Attributes:
        kind: Name of an :class:`~lightning_ncclsafe.rules.activity.Kind`.
        call: The function.
        weak: Whether it counts only with a collective outstanding and no user code below it, as its C++ code both
            computes and waits.
        exempt: Whether Lightning waits there without limit on purpose.
    """

    kind: str
    call: str = ""
    weak: bool = False
    exempt: bool = False


@dataclass(frozen=True, slots=True)
class _Pattern:
    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str]
    weak: bool = False
    exempt: bool = False


def _pattern(kind: str, file: str, function: str = "", *, weak: bool = False, exempt: bool = False) -> _Pattern:
    return _Pattern(kind, re.compile(file), re.compile(f"(?:{function})$" if function else ""), weak, exempt)


_PYTORCH = r"/(?:lightning/pytorch|pytorch_lightning)"
_FABRIC = r"/(?:lightning/fabric|lightning_fabric)"

# The first pattern that fits decides, so exceptions stand before their file's general line.
_PATTERNS = (
    _pattern("STORE", rf"{_FABRIC}/utilities/distributed\.py$", "__exit__|__call__", exempt=True),
    _pattern("STORE", r"/lightning_ncclsafe/loaders/agreement\.py$", "_wait_until"),
    _pattern("COLLECTIVE", r"/lightning_ncclsafe/_torch\.py$", "wait_for_vote"),
    _pattern("USER", r"/torch/distributed/distributed_c10d\.py$", "_object_to_tensor|_tensor_to_object"),
    _pattern(
        "STORE",
        r"/torch/distributed/distributed_c10d\.py$",
        "init_process_group|monitored_barrier|_store_based_barrier|new_.*group.*|_new_.*group.*|split_group",
    ),
    _pattern("STORE", r"/torch/distributed/(?:rendezvous\.py|elastic/)"),
    _pattern("COLLECTIVE", r"/torch/distributed/(?:distributed_c10d|_functional_collectives|utils)\.py$"),
    _pattern("CHECKPOINT", r"/torch/distributed/checkpoint/", "(?!.*load).*"),
    _pattern("COLLECTIVE", r"/torch/autograd/graph\.py$", "_engine_run_backward", weak=True),
    _pattern("COLLECTIVE", r"/torch/nn/parallel/distributed\.py$", weak=True),
    _pattern("COLLECTIVE", r"/torch/distributed/(?:fsdp|_composable|tensor|algorithms|nn)/", weak=True),
    _pattern("LOADER", r"/torch/utils/data/(?:dataloader\.py|_utils/fetch\.py)$"),
    _pattern("LOADER", rf"{_PYTORCH}/loops/fetchers\.py$", "__next__|__iter__|_fetch_next_batch|prefetch.*"),
    _pattern("LOGGER", r"/lightning_ncclsafe/loggers/"),
    _pattern("LOGGER", rf"(?:{_PYTORCH}|{_FABRIC})/loggers/"),
    _pattern("LOGGER", rf"{_PYTORCH}/.*/logger_connector\.py$", "log_metrics"),
    _pattern("LOGGER", r"/torch/utils/tensorboard/|/tensorboard/|/tensorboardX/"),
    _pattern("LOGGER", r"-packages/(?:wandb/(?!agents/)|mlflow/|comet_ml/|neptune/)"),
    _pattern("CHECKPOINT", r"/torch/serialization\.py$", "save|_save|_legacy_save"),
    _pattern("CHECKPOINT", rf"(?:{_PYTORCH}|{_FABRIC})/plugins/io/", "(?!.*load).*"),
    _pattern("CHECKPOINT", rf"{_FABRIC}/utilities/cloud_io\.py$", "_atomic_save"),
    _pattern("CHECKPOINT", rf"{_PYTORCH}/callbacks/model_checkpoint\.py$", "on_.*|_save.*|save.*|_remove.*"),
    _pattern("CHECKPOINT", rf"{_PYTORCH}/trainer/trainer\.py$", "save_checkpoint"),
    _pattern("CHECKPOINT", rf"{_PYTORCH}/.*/checkpoint_connector\.py$", "dump_checkpoint"),
)

# Reading a device's result in Python waits for everything queued on it, collectives included.
_SYNC = re.compile(r"\.(?:item|cpu|tolist|numpy)\(|synchronize\(|\.to\(|\bfloat\(|\bint\(|\bbool\(")
_TRAINER_RUN = re.compile(rf"{_PYTORCH}/trainer/trainer\.py$")


def landmark(frame: Frame) -> Landmark | None:
    """What this frame says about the frames below it; None for one that says nothing, such as the user's own."""
    return None if frame.user else _landmark(frame.file, frame.function)


@lru_cache(maxsize=4096)
def _landmark(file: str, function: str) -> Landmark | None:
    path = "/" + file.replace("\\", "/")
    for pattern in _PATTERNS:
        if pattern.file.search(path) and pattern.function.match(function):
            return Landmark(pattern.kind, function, pattern.weak, pattern.exempt)
    return None


def looks_like_device_sync(frame: Frame) -> bool:
    """Whether the line reads a value back from a device, or synchronises with one."""
    return _SYNC.search(frame.code) is not None


def starts_trainer(frame: Frame) -> bool:
    """Whether the Trainer starts to run in this frame."""
    return frame.function == "_run" and _TRAINER_RUN.search("/" + frame.file.replace("\\", "/")) is not None
