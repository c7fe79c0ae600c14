"""The tests in this folder need a GPU and NCCL; without, they are skipped for one reason, before torch is imported."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_gpu import is_rehearsal, missing

# What the hangs and the benchmark have of their own is used here, too.
for folder in (Path(__file__).parents[2] / "examples", Path(__file__).parents[1] / "benchmarks"):
    sys.path.append(str(folder))


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
