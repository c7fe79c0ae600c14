"""Trainings on NCCL that are ended at their limit: ranks leave in time with one status, and no checkpoint changes."""

import json
from pathlib import Path

import pytest
from ended_fit import LATE_FIRST, LATE_RANK, LATE_TIMEOUT_S, LIMIT_S, RANKS, SCENES, check, run, start

from lightning_ncclsafe.guard.ending import EXIT_CODE


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("scene", SCENES)
# 3 is PyTorch's default; with 1 its watchdogs abort, once peers are gone, and wake the main thread.
@pytest.mark.parametrize("handling", ["3", "1"])
def test_every_rank_leaves_with_its_status_and_no_checkpoint_changes(handling: str, scene: str, tmp_path: Path) -> None:
    check(run(scene, tmp_path, TORCH_NCCL_ASYNC_ERROR_HANDLING=handling), EXIT_CODE)


@pytest.mark.timeout(LATE_TIMEOUT_S + 90)
def test_a_first_collective_that_one_rank_joins_a_minute_late_is_reported_and_not_ended(tmp_path: Path) -> None:
    ended = start(LATE_FIRST, tmp_path, {}, LATE_TIMEOUT_S + 60)
    assert ended.exit_codes == (0,) * RANKS, ended.story
    report = json.loads(min(tmp_path.glob("ncclsafe/*/report.json")).read_text())
    assert report["findings"][0]["ranks"] == [LATE_RANK], ended.story
    assert "recovered after" in "".join(ended.said)
