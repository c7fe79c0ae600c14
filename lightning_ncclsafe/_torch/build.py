"""Properties of this build of torch."""

from contextlib import suppress
from typing import Any

import torch

c10d: Any = getattr(torch._C, "_distributed_c10d", None)
"""The part of ``torch.distributed`` that is C++; None in builds without distributed support."""

GLOO_TIMEOUT_CHANGES = torch.__version__ >= "2.13"
"""Whether gloo's groups keep to a timeout that is set later: not in torch 2.8 (pytorch#165422), and in 2.13 they do."""


def operation_threads() -> int:
    """Number of threads of one operation on the CPU."""
    return torch.get_num_threads()


def versions() -> dict[str, str]:
    """Versions of torch, CUDA and NCCL as this build knows them."""
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
        with suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
