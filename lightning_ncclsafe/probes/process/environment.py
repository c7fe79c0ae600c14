"""Versions and environment variables that ranks should have in common, and this rank's place in its launch."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distribution, version
from pathlib import Path

from lightning_ncclsafe.probes.absent import or_none

JOB = "NCCLSAFE_JOB"
"""The variable that names the job, the same for all its starts, if its launcher does not name it."""

# Variables of NCCL, gloo, torch.distributed and Lightning, and those that set numbers of threads.
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "PL_")
_NAMES = re.compile(
    r"CUDA_(LAUNCH_BLOCKING|VISIBLE_DEVICES|DEVICE_ORDER)|(OMP|MKL)_NUM_THREADS|PYTORCH_(\w+_)?ALLOC_CONF"
)
_MOST_CHARACTERS = 200
# What torchrun sets if it is given none.
_NO_RUN_ID = "none"
_BUILT = "torch/version.py"
# Package names; the first installed one counts.
_LIGHTNING = ("lightning", "pytorch-lightning")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")


def launch_words(environ: Mapping[str, str] = os.environ) -> str:
    """What started the job, the same for all its starts: ``"SLURM job 4711"``; empty if nothing can restart it."""
    if name := environ.get(JOB):
        return f"job {name}"
    if "TORCHELASTIC_RUN_ID" in environ:
        run = environ["TORCHELASTIC_RUN_ID"]
        return "torchrun" if run in ("", _NO_RUN_ID) else f"torchrun {run}"
    return f"SLURM job {environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environ else ""


def settings_seen(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that matter to distributed training, in alphabetical order; of each value, at most 200 characters."""
    names = sorted(name for name in environment if name.startswith(_PREFIXES) or _NAMES.fullmatch(name))
    return {name: environment[name][:_MOST_CHARACTERS] for name in names}


def versions_seen() -> dict[str, str]:
    """The installed versions of Python, torch, CUDA, NCCL and Lightning.

    They come from torch if it is imported already, or else from package metadata: importing torch takes seconds.
    """
    torch = or_none(_of_torch if "torch" in sys.modules else _of_packages) or {}
    found = {"python": platform.python_version(), **torch, "lightning": _installed(*_LIGHTNING)}
    return {name: number for name, number in found.items() if number}


def _of_torch() -> dict[str, str]:
    from lightning_ncclsafe._torch import build

    return build.versions()


def _of_packages() -> dict[str, str]:
    """The versions from package metadata, in torch's format: two numbers for CUDA."""
    cuda = ".".join(_installed(*_CUDA).split(".")[:2])
    return {"torch": or_none(_built) or "", "cuda": cuda, "nccl": _installed(*_NCCL)}


def _built() -> str:
    """Torch's version with its build, ``"2.14.1+cu130"``, which the metadata of public packages lacks."""
    installed = distribution("torch")
    found = re.search(r"^__version__ = ['\"](.+)['\"]", Path(str(installed.locate_file(_BUILT))).read_text(), re.M)
    return found[1] if found is not None else installed.version


def _installed(*names: str) -> str:
    return next((number for name in names if (number := or_none(partial(version, name)))), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process's place in its job.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its host.
        world_size: Number of ranks; 1 without a launcher, or if the launcher does not set how to reach the others.
        master_addr: Host of the job's store.
        master_port: Its port.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = ""
    master_port: int = 0


_LAST_PORT = 65_535
# Variables for rank, local rank and number of ranks: of torchrun (first and last also Kubeflow), SLURM, Open MPI.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def launched(environment: Mapping[str, str]) -> Launched:
    """Reads the variables of torchrun, SLURM or Open MPI; all need ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        ValueError: If a launcher has set this rank, and ``MASTER_PORT`` is not a port.
    """
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    for rank, local_rank, world_size in _LAUNCHERS:
        known = [_number(environment.get(name)) for name in (rank, world_size)]
        if address and port and known[0] is not None and known[1] is not None and known[0] < known[1]:
            return Launched(
                rank=known[0],
                local_rank=_number(environment.get(local_rank)) or 0,
                world_size=known[1],
                master_addr=address,
                master_port=_port(port),
            )
    return Launched()


def _port(text: str) -> int:
    port = _number(text)
    if port is None or not 1 <= port <= _LAST_PORT:
        raise ValueError(
            f"MASTER_PORT={text} is not a port; set it to a number from 1 to {_LAST_PORT}, the same on all ranks"
        )
    return port


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None
