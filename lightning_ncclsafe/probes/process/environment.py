"""Versions and variables of the environment that ranks should have in common."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import distribution, version
from pathlib import Path

from lightning_ncclsafe.probes.absent import or_none

# What NCCL, gloo, torch's distributed part and Lightning look at, and what decides how many threads there are.
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "PL_")
_NAMES = re.compile(
    r"CUDA_(LAUNCH_BLOCKING|VISIBLE_DEVICES|DEVICE_ORDER)|(OMP|MKL)_NUM_THREADS|PYTORCH_(\w+_)?ALLOC_CONF"
)
_MOST_CHARACTERS = 200
_BUILT = "torch/version.py"
# What each is installed as; the first that is.
_LIGHTNING = ("lightning", "pytorch-lightning")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")


def settings_seen(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that matter to distributed training, by name, in alphabetical order; values of 200 characters at most.

    Args:
        environment: Of this process.
    """
    names = sorted(name for name in environment if name.startswith(_PREFIXES) or _NAMES.fullmatch(name))
    return {name: environment[name][:_MOST_CHARACTERS] for name in names}


def versions_seen() -> dict[str, str]:
    """Versions of Python, torch, CUDA, NCCL and Lightning, as far as they are there.

    Torch is asked where it is imported already; importing it takes seconds, so that otherwise the packages are.
    """
    torch = or_none(_of_torch if "torch" in sys.modules else _of_packages) or {}
    found = {"python": platform.python_version(), **torch, "lightning": _installed(*_LIGHTNING)}
    return {name: number for name, number in found.items() if number}


def _of_torch() -> dict[str, str]:
    from lightning_ncclsafe import _torch

    return _torch.versions()


def _of_packages() -> dict[str, str]:
    """As torch tells them: of CUDA the first two numbers."""
    cuda = ".".join(_installed(*_CUDA).split(".")[:2])
    return {"torch": or_none(_built) or "", "cuda": cuda, "nccl": _installed(*_NCCL)}


def _built() -> str:
    """Torch's version with its build, ``"2.14.1+cu130"``: packages of the public registry are named without that."""
    installed = distribution("torch")
    found = re.search(r"^__version__ = ['\"](.+)['\"]", Path(str(installed.locate_file(_BUILT))).read_text(), re.M)
    return found[1] if found is not None else installed.version


def _installed(*names: str) -> str:
    return next((number for name in names if (number := or_none(partial(version, name)))), "")
