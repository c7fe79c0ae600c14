"""NCCL's recorder is read without stopping Python, also where the driver is busy."""

from pathlib import Path

import pytest
from record import LIMIT_S, told_by_ranks

pytestmark = [pytest.mark.timeout(LIMIT_S + 30), pytest.mark.usefixtures("needs_nccl")]


def test_python_goes_on_while_cuda_free_waits_for_the_device(tmp_path: Path) -> None:
    told, _ = told_by_ranks("behind_cuda_free", 2, tmp_path)
    assert told["is_freeing"], f"cudaFree did not wait, so nothing is shown: {told}"
    assert told["longest_pause_s"] < 0.5, told
    assert told["collectives"] if told["driver_answers"] else told["unrecorded"] == ["driver-silent"], told
