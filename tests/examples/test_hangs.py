"""The five example hangs, as a user runs them: the first report has the right cause, ranks, file and line."""

from pathlib import Path

import pytest
from hit_rate import TRUTHS, errors, first_report, running

from lightning_ncclsafe.ending import EXIT_CODE


@pytest.mark.parametrize("name", TRUTHS)
def test_the_hang_is_named(name: str, tmp_path: Path) -> None:
    report = first_report(name, tmp_path)
    assert not errors(name, report), report["findings"]


def test_a_hang_ends_with_its_report_and_not_before(tmp_path: Path) -> None:
    with running("rank0_evaluation", tmp_path, "--suspect-after", "2", "--timeout", "6") as process:
        assert process.wait(50) in (1, EXIT_CODE)
    output = (tmp_path / "output").read_text()
    assert output.count("[ncclsafe] rank-zero-only-work: Rank 0") == 2
    assert "[ncclsafe] the run cannot go on, it is ended" in output
