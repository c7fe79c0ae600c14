"""Whole trainings on two ranks that are ended, saved, and resumed by Lightning: they end with the same weights."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import Warm, ranks_of

PROGRAM = Path(__file__).with_name("saved_fit.py")
LIMIT_S = 150
LAST_STEP = 6  # of two epochs of 8 batches, three to a step

UNDISTURBED = ("nothing",)
RAISES = ("raise",)
KILLED = ("kill", "--rank=0")
STALLS = ("stall", "--accumulate=3")
VALIDATES = ("kill", "--hook=validation_step", "--batch=1")
TERMINATED = ("sigterm", "--accumulate=3", "--pace=0.05", "--batch=4")
OVERDUE = ("sigterm-stuck", "--grace=12", "--timeout=7")
ALONE = ("sigterm-late", "--devices=1", "--rank=0", "--grace=8")
FIRST = [OVERDUE, ALONE, STALLS, KILLED]


@dataclass
class Outcome:
    """How a run has ended, and the one that has gone on from what it had saved.

    Attributes:
        output: What the first one has said.
        saved: Names of the checkpoints that it has left.
        resumed: What the second one has said.
        weights: At the end.
    """

    output: str
    saved: list[str]
    resumed: str
    weights: Any


def run_program(warm: Warm, folder: Path, *options: str) -> Outcome:
    def run(*more: str) -> str:
        argv = [str(PROGRAM), *options, *more, f"--root-dir={folder}"]
        return warm.run(argv, folder, timeout_s=LIMIT_S, envs=ranks_of(1 if "--devices=1" in options else 2))[1]

    output, resumed = run(), ""
    saved = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    if saved:
        resumed = run("--resume")
    weights = folder / "weights.pt"
    return Outcome(output, saved, resumed, torch.load(weights, weights_only=True) if weights.exists() else None)


@pytest.fixture(scope="module")
def undisturbed(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The weights at the end, by how many batches are accumulated."""
    return {
        accumulate: run_program(
            warm, tmp_path_factory.mktemp("undisturbed"), *UNDISTURBED, f"--accumulate={accumulate}"
        ).weights
        for accumulate in (1, 3)
    }


def assert_went_on(outcome: Outcome, undisturbed: Any, steps: int) -> None:
    assert len(outcome.saved) == 1, outcome.output
    assert re.search(rf"rank \d saved the state after step {steps} in ", outcome.output), outcome.output
    assert outcome.weights is not None, outcome.resumed
    for name, tensor in undisturbed.items():
        if "running" in name and "rank 0 saved" not in outcome.output:
            continue  # DDP sends those of rank 0 to all, before the next batch: they are lost with it
        assert torch.equal(tensor, outcome.weights[name]), name


@pytest.mark.program(*RAISES)
def test_a_run_whose_rank_raises_is_saved(outcome: Outcome, undisturbed: dict[int, Any]) -> None:
    assert_went_on(outcome, undisturbed[1], 11)
    assert "rank 0 saved" in outcome.output
    assert "the batch is broken" in outcome.output
    refused = "rank 1: OnExceptionCheckpoint saves nothing, because that needs all ranks and not all of them failed"
    assert outcome.output.count(refused) == 1, outcome.output


@pytest.mark.program(*KILLED)
def test_a_run_whose_store_host_dies_is_saved(outcome: Outcome, undisturbed: dict[int, Any]) -> None:
    assert_went_on(outcome, undisturbed[1], 11)


@pytest.mark.program(*VALIDATES)
def test_a_run_whose_rank_dies_in_validation_is_saved(outcome: Outcome, undisturbed: dict[int, Any]) -> None:
    assert_went_on(outcome, undisturbed[1], 8)


@pytest.mark.program(*STALLS)
def test_a_hang_during_accumulation_is_saved(outcome: Outcome, undisturbed: dict[int, Any]) -> None:
    assert_went_on(outcome, undisturbed[3], 4)


@pytest.mark.program(*TERMINATED)
def test_sigterm_during_accumulation_saves(outcome: Outcome, undisturbed: dict[int, Any]) -> None:
    steps = int(re.findall(r"saved the state after step (\d+)", outcome.output)[0])
    assert_went_on(outcome, undisturbed[3], steps)
    # All ranks stop before the same batch; how soon they agree on it is the machine's business.
    assert steps == max(map(int, re.findall(r"step (\d+) was made", outcome.output)))
    assert 0 < steps < LAST_STEP


@pytest.mark.program(*OVERDUE)
def test_sigterm_saves_if_no_rank_reaches_its_next_batch(outcome: Outcome, undisturbed: dict[int, Any]) -> None:
    """A side thread saves before the limit is reached, and nothing is saved again at the limit."""
    assert_went_on(outcome, undisturbed[1], 11)
    assert outcome.output.index("saved the state") < outcome.output.index("the run cannot continue")


@pytest.mark.program(*ALONE)
def test_sigterm_in_a_long_batch_of_a_single_rank_saves(outcome: Outcome) -> None:
    assert len(outcome.saved) == 1, outcome.output
    assert outcome.output.index("rank 0 saved the state after step 11") < outcome.output.index("the batch goes on")
    assert "rank 0 has made 16 steps" in outcome.resumed, outcome.resumed
