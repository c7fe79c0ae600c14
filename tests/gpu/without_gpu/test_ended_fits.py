"""Trainings that are ended at their limit, on gloo: whatever wakes the main thread, checkpoints are as they were."""

from pathlib import Path

import pytest
from ended_fit import LIMIT_S, SCENES, check, run

from lightning_ncclsafe.ending import EXIT_CODE


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("scene", SCENES)
def test_every_rank_leaves_with_its_status_and_no_checkpoint_changes(scene: str, tmp_path: Path) -> None:
    check(run(scene, tmp_path, CUDA_VISIBLE_DEVICES=""), EXIT_CODE)
