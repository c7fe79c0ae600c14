"""Whole trainings that are sent SIGTERM: all ranks end before the same batch, as Lightning's own do at their best."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.version import Version
from warm import Warm, ranks_of

SCENARIO = Path(__file__).with_name("scenario.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LIMIT_S = 150
HAS_MADE = r"rank (\d) has made (\d+) steps, begun (\d+) batches and ended (\d+) of validation, with (\d+) broadcasts"

# They have far more to do than they can before they are told to stop.
LONG = ("--max-epochs=40", "--pace=0.05", "--keep")
# Before its first step ModelCheckpoint has nothing to save.
ACCUMULATING = ("cluster", "sigterm", "--devices=3", "--batch=4", "--accumulate=4", *LONG)
VALIDATING = (
    *("cluster", "sigterm", "--devices=3", "--rank=2", "--batch=0", "--hook=validation_step", "--validate"),
    *("--pace=0.3", "--keep"),
)
ALL_AT_ONCE = ("cluster", "sigterm", "--devices=3", "--rank=-1", *LONG)
STREAMING = ("cluster", "sigterm", "--devices=3", "--data=stream", *LONG)
FORWARDED = ("popen", "sigterm", "--rank=0", *LONG)
AGENT = ("torchrun", "sigterm-launcher", *LONG)
PREDICTING = ("cluster", "sigterm", "--devices=3", "--calls=predict", "--hook=predict_step", "--batch=0", "--pace=0.3")
PREDICTING_TOGETHER = ("cluster", "sigterm", "--devices=2", "--tensor-parallel=1", *PREDICTING[3:])
UNTOLD = ("cluster", "nothing", "--devices=2")
STOCK = ("cluster", "nothing", "--devices=2", "--sigterm-broadcast")
FIRST = [AGENT, FORWARDED]


@dataclass
class Rank:
    """How far a rank has come.

    Attributes:
        steps: Optimizer steps that it has made.
        batches: Batches of training that it has begun.
        validation: Batches of the last validation that it has ended.
        broadcasts: That it has taken part in.
    """

    steps: int
    batches: int
    validation: int
    broadcasts: int


@dataclass
class Outcome:
    """How a run of ``scenario.py`` ended, of which nothing runs any more.

    Attributes:
        exit_code: Of the process that was started, or the worst of the ranks'.
        output: What was said.
        ranks: The ranks that have said how far they have come.
        folder: Where checkpoints are.
    """

    exit_code: int
    output: str
    ranks: dict[int, Rank]
    folder: Path


def run_program(warm: Warm, folder: Path, launcher: str, *options: str) -> Outcome:
    argv = [*(TORCHRUN if launcher == "torchrun" else ()), str(SCENARIO), *options, f"--root-dir={folder}"]
    devices = next((int(option.split("=")[1]) for option in options if option.startswith("--devices")), 2)
    envs = ranks_of(devices) if launcher == "cluster" else [{}]
    # All ranks that a launcher starts.
    codes, output = warm.run(argv, folder, timeout_s=LIMIT_S, envs=envs, children=0 if launcher == "cluster" else 2)
    ranks = {int(rank): Rank(*map(int, counts)) for rank, *counts in re.findall(HAS_MADE, output)}
    return Outcome(max(codes, key=abs), output, ranks, folder)


def agreed(outcome: Outcome, world_size: int) -> Rank:
    """How far all ranks have come, which have stopped too soon, and without more ado."""
    assert sorted(outcome.ranks) == [*range(world_size)], outcome.output
    first = outcome.ranks[0]
    for rank in outcome.ranks.values():
        assert (rank.steps, rank.batches, rank.validation) == (first.steps, first.batches, first.validation)
    assert "done" not in outcome.output
    assert outcome.output.count("received SIGTERM") == 1, outcome.output
    return first


def saved_step(path: Path) -> Any:
    return torch.load(path, weights_only=False)["global_step"]


def assert_saved(outcome: Outcome, steps: int) -> None:
    """What Lightning saves where training ends with an exception."""
    assert saved_step(outcome.folder / "on_exception.ckpt") == steps
    if "save_on_exception" not in inspect.signature(ModelCheckpoint).parameters:
        return  # before Lightning 2.6
    assert [path.name for path in (outcome.folder / "best").iterdir()] == [f"step={steps}.ckpt"]
    assert saved_step(outcome.folder / "best" / f"step={steps}.ckpt") == steps


@pytest.mark.program(*ACCUMULATING)
def test_sigterm_on_one_accumulating_rank_stops_all(outcome: Outcome) -> None:
    """Between two steps no rank waits for another, so each may be at a different batch."""
    assert outcome.exit_code == 0, outcome.output
    rank = agreed(outcome, 3)
    assert rank.batches >= 5, "the signal arrives in the fifth batch"
    assert_saved(outcome, rank.steps)


@pytest.mark.program(*VALIDATING)
def test_sigterm_on_one_validating_rank_stops_all(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    rank = agreed(outcome, 3)
    assert 1 <= rank.validation < 6
    assert_saved(outcome, 6)


@pytest.mark.program(*ALL_AT_ONCE)
def test_sigterm_on_all_ranks_at_once_stops_all(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert_saved(outcome, agreed(outcome, 3).steps)


@pytest.mark.program(*STREAMING)
def test_sigterm_on_one_voting_rank_stops_all(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    rank = agreed(outcome, 3)
    assert rank.batches >= 4
    assert_saved(outcome, rank.steps)


@pytest.mark.program(*FORWARDED)
def test_the_launching_rank_forwards_sigterm(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert_saved(outcome, agreed(outcome, 2).steps)


@pytest.mark.program(*AGENT)
def test_sigterm_on_torchrun_stops_all(outcome: Outcome) -> None:
    """Torchrun forwards the signal to its workers, waits for them, and fails."""
    assert "got signal: 15" in outcome.output
    assert outcome.exit_code == 1
    assert_saved(outcome, agreed(outcome, 2).steps)


@pytest.mark.program(*PREDICTING)
def test_predicting_ranks_each_stop_before_their_next_batch(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert sorted(outcome.ranks) == [0, 1, 2]
    assert "done" not in outcome.output
    assert "rank 1 received SIGTERM; each rank will stop before its next batch" in outcome.output


@pytest.mark.program(*PREDICTING_TOGETHER)
def test_ranks_that_predict_together_stop_before_the_same_batch(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert sorted(outcome.ranks) == [0, 1]
    assert "done" not in outcome.output
    assert "rank 1 received SIGTERM; all ranks will stop before the same batch" in outcome.output


@pytest.mark.program(*UNTOLD)
def test_without_a_signal_nothing_is_broadcast_before_a_batch(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert [rank.batches for rank in outcome.ranks.values()] == [16, 16]
    assert all(0 < rank.broadcasts < 10 for rank in outcome.ranks.values())
    assert "SIGTERM" not in outcome.output


@pytest.mark.skipif(Version(L.__version__) < Version("2.5.2"), reason="this Lightning does not broadcast it")
@pytest.mark.program(*STOCK)
def test_lightnings_own_handling_is_kept_on_request(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert all(rank.broadcasts >= 16 for rank in outcome.ranks.values())
