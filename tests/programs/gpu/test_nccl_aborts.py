"""What an abort does to a main thread that waits in NCCL: why the guard ends processes, and aborts nothing."""

from pathlib import Path

import pytest
from record import LIMIT_S, told_by_ranks

pytestmark = [pytest.mark.timeout(LIMIT_S + 30), pytest.mark.usefixtures("needs_nccl")]

WITHIN_S = 8.0


@pytest.mark.parametrize("wait", ["in_synchronize", "in_item", "in_barrier"])
def test_a_wait_ends_as_if_nothing_had_happened_and_only_the_next_collective_raises(wait: str, tmp_path: Path) -> None:
    told, _ = told_by_ranks(wait, 2, tmp_path)
    assert told["after_s"] >= 0, f"the wait ended before the abort, with {told['raised'] or 'nothing'}"
    assert told["after_s"] < WITHIN_S, told
    assert not told["raised"] and told["next_raised"], told
