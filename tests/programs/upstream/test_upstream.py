"""What `make upstream` counts as different; that ours are in place it asks itself, as that needs new processes."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from compare import OURS, STOCK, Compared, table  # noqa: E402
from known import KNOWN  # noqa: E402
from outcomes import Outcome  # noqa: E402

TEST = "tests/tests_pytorch/strategies/test_ddp.py::test_it"
PASSED, SKIPPED, FAILED, ENDED = (Outcome(kind) for kind in ("passed", "skipped", "failed", "ended"))


@pytest.mark.parametrize(
    ("stock", "ours", "again", "verdict"),
    [
        (PASSED, PASSED, {}, "both pass"),
        (SKIPPED, SKIPPED, {}, "skipped"),
        (FAILED, ENDED, {}, "both fail"),
        (FAILED, PASSED, {}, "stock fails"),
        (PASSED, FAILED, {}, "replacement fails"),
        (PASSED, ENDED, {STOCK: 3, OURS: 2}, "replacement fails"),
        (PASSED, SKIPPED, {STOCK: 3, OURS: 0}, "replacement fails"),
        (PASSED, FAILED, {STOCK: 2, OURS: 2}, "flaky"),
    ],
)
def test_a_test_that_passes_with_stock_only_is_a_difference(
    stock: Outcome, ours: Outcome, again: dict[str, int], verdict: str
) -> None:
    one = Compared(TEST, stock, ours, again)
    assert one.verdict == verdict
    assert "| strategies | 1 | 0 |" in table([one])


def test_a_difference_with_a_reason_is_known() -> None:
    for test in KNOWN:
        assert Compared(f"tests/tests_pytorch/{test}[cpu-1]", PASSED, FAILED).verdict == "known"
        assert Compared(f"tests/tests_pytorch/{test}[cpu-1]", PASSED, PASSED).verdict == "both pass"
