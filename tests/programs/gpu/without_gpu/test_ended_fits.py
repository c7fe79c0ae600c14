"""Trainings that are ended at their limit, on gloo: whatever wakes the main thread, checkpoints are as they were."""

import json
import time
from pathlib import Path

import ended_fit
import pytest
from ended_fit import LIMIT_S, RANKS, SCENES, Outcome, check, contents
from one_gpu import Ended, environment
from warm import Warm, free_port

from lightning_ncclsafe.guard.ending import EXIT_CODE

pytestmark = pytest.mark.timeout(LIMIT_S + 30)
FIRST: list[tuple[str, ...]] = []
# Each waits for its limit for most of the time.
AT_ONCE = len(SCENES)


def run_program(warm: Warm, folder: Path, scene: str) -> Outcome:
    port = free_port()
    envs = [environment(rank, RANKS, port) | {"CUDA_VISIBLE_DEVICES": ""} for rank in range(RANKS)]
    codes, output = warm.run([ended_fit.__file__, scene, str(folder)], folder, timeout_s=LIMIT_S, envs=envs)
    before = folder / "before.json"
    took_s = time.time() - before.stat().st_mtime
    # Of all ranks, in one.
    said = (output, *[""] * (RANKS - 1))
    return Outcome(Ended(tuple(codes), said), json.loads(before.read_text()), contents(folder), took_s)


@pytest.mark.parametrize("scene", [pytest.param(scene, marks=pytest.mark.program(scene)) for scene in SCENES])
def test_every_rank_leaves_with_its_status_and_no_checkpoint_changes(scene: str, outcome: Outcome) -> None:
    check(outcome, EXIT_CODE)
