"""Aborting the process groups wakes a main thread that waits in NCCL."""

from pathlib import Path

import pytest
from record import LIMIT_S, told_by_ranks

pytestmark = [pytest.mark.timeout(LIMIT_S + 30), pytest.mark.usefixtures("needs_nccl")]

# The guard gives the main thread 10 s to leave: lightning_ncclsafe/ending.py.
WITHIN_S = 8.0


@pytest.mark.parametrize("wait", ["in_synchronize", "in_item", "in_barrier"])
def test_an_abort_from_another_thread_wakes_the_main_thread(wait: str, tmp_path: Path) -> None:
    told, _ = told_by_ranks(wait, 2, tmp_path)
    assert told["can_be_aborted"]
    assert told["after_s"] >= 0, f"the wait ended before the abort, with {told['raised'] or 'nothing'}"
    assert told["after_s"] < WITHIN_S, told
    assert told["raised"], "the wait ended, and so did the next collective, without an exception"
