"""What of the kit needs no GPU; its helpers lie in the folder above."""

import sys
from pathlib import Path

import pytest

if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """In place of the one that skips."""
