"""The tests in this folder need a GPU and NCCL; without, they are skipped for one reason, before torch is imported."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_gpu import is_rehearsal

# What the hangs and the benchmark have of their own is used here, too.
for folder in ("examples", "benchmarks"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


def missing() -> str:
    """What is missing here to run NCCL; empty if nothing is."""
    if is_rehearsal():
        return ""
    if not _driver_sees_a_gpu():
        return "needs an NVIDIA GPU, and this host has none (tests/gpu/README.md)"
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return f"needs torch built for CUDA; {torch.__version__} sees no GPU (tests/gpu/README.md)"
    if not dist.is_nccl_available():
        return f"needs torch built with NCCL; {torch.__version__} has none (tests/gpu/README.md)"
    return ""


def _driver_sees_a_gpu() -> bool:
    """Asked of the driver: to ask torch means to import it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return bool(pynvml.nvmlDeviceGetCount() > 0)
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Iterator[None]:
    """Skips the test where there is none."""
    if reason := missing():
        pytest.skip(reason)
    yield


@pytest.fixture
def needs_nccl() -> None:
    """Skips what a rehearsal cannot do."""
    if is_rehearsal():
        pytest.skip("needs NCCL, and this is a rehearsal with gloo (NCCLSAFE_REHEARSE=1)")
