"""Trainings of models that are split among two ranks, ended, saved together, and resumed: bit for bit the same."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import Warm, ranks_of

PROGRAM = Path(__file__).with_name("sharded_fit.py")
LIMIT_S = 150
AT_ONCE = 2
STOCK = {"SafeModelParallel": "ModelParallelStrategy", "SafeFSDP": "StockFSDP"}

FSDP2_RAISES = ("raise", "--strategy=SafeModelParallel")
FSDP2_UNDISTURBED = ("nothing", "--strategy=SafeModelParallel")
FSDP2_KILLED = ("kill", "--strategy=SafeModelParallel")
# Where nothing else is known of what is usual, ranks wait for long before they ask: not so with one that has failed.
FSDP2_PATIENT = ("raise", "--strategy=SafeModelParallel", "--suspect-after=25", "--timeout=55")
FSDP2_TERMINATED = ("sigterm", "--strategy=SafeModelParallel", "--batch=4", "--pace=0.05")
FSDP_STALLS = ("stall", "--strategy=SafeFSDP")
FSDP_UNDISTURBED = ("nothing", "--strategy=SafeFSDP")
FIRST = [FSDP_STALLS, FSDP2_RAISES]


@dataclass
class Outcome:
    """How a run has ended, and those that have gone on from what it had saved.

    Attributes:
        output: What the first one has said.
        saved: Names of what it has left in its folder of checkpoints.
        stock: What has been said by Lightning's own strategy, which was given that.
        resumed: What has been said by ours, which has found it.
    """

    output: str
    saved: list[str]
    stock: str = ""
    resumed: str = ""


def run_program(warm: Warm, folder: Path, deed: str, strategy: str, *options: str) -> Outcome:
    def run(*argv: str) -> str:
        argv = (str(PROGRAM), *argv, f"--root-dir={folder}")
        return warm.run(argv, folder, timeout_s=LIMIT_S, envs=ranks_of(2))[1]

    checkpoints = folder / "checkpoints"
    output = run(deed, strategy, *options)
    outcome = Outcome(output, sorted(path.name for path in checkpoints.glob("*")))
    if len(outcome.saved) == 1:
        path = checkpoints / outcome.saved[0]
        stock = STOCK[strategy.partition("=")[2]]
        outcome.stock = run("nothing", f"--strategy={stock}", f"--load={path}")
        outcome.resumed = run("nothing", strategy, "--resume")
    return outcome


def states(output: str, said: str) -> dict[str, str]:
    """What each rank has of weights and optimizer, where it says so."""
    return dict(re.findall(rf"rank (\d) {said} (\w+)$", output, re.MULTILINE))


def assert_saved(outcome: Outcome, step: int = 11) -> None:
    (name,) = outcome.saved
    assert re.fullmatch(rf"just-in-time-epoch=\d-step={step}\.ckpt", name), outcome.output
    assert f"ranks 0-1 saved the state after step {step} together in " in outcome.output
    then = states(outcome.output, f"after step {step} has")
    assert sorted(then) == ["0", "1"]
    assert states(outcome.stock, f"begins at step {step} with") == then, outcome.stock
    assert states(outcome.resumed, f"begins at step {step} with") == then, outcome.resumed
    assert "start anew" not in outcome.resumed


def assert_went_on(outcome: Outcome, undisturbed: Outcome) -> None:
    end = states(undisturbed.output, "has made 16 steps and has")
    assert sorted(end) == ["0", "1"], undisturbed.output
    assert states(outcome.resumed, "has made 16 steps and has") == end, outcome.resumed


@pytest.mark.program(*FSDP2_RAISES)
def test_fsdp2_is_saved_if_a_rank_raises(outcome: Outcome) -> None:
    assert_saved(outcome)


@pytest.mark.program(*FSDP_STALLS)
def test_fsdp_is_saved_at_its_limit(outcome: Outcome) -> None:
    assert_saved(outcome)


@pytest.mark.program(*FSDP2_PATIENT)
def test_a_raising_rank_is_saved_before_a_hang_is_suspected(outcome: Outcome) -> None:
    assert_saved(outcome)


@pytest.mark.program(*FSDP2_TERMINATED)
def test_sigterm_saves_all_shards(outcome: Outcome) -> None:
    """All ranks stop before the same batch; which one depends on timing."""
    assert_saved(outcome, max(map(int, re.findall(r"after step (\d+) has", outcome.output))))


@pytest.mark.program(*FSDP2_UNDISTURBED)
def test_fsdp2_resumes_with_identical_results(outcome: Outcome, programs: dict[tuple[str, ...], object]) -> None:
    assert_went_on(programs[FSDP2_RAISES].result(), outcome)  # type: ignore[attr-defined]


@pytest.mark.program(*FSDP_UNDISTURBED)
def test_fsdp_resumes_with_identical_results(outcome: Outcome, programs: dict[tuple[str, ...], object]) -> None:
    assert_went_on(programs[FSDP_STALLS].result(), outcome)  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [FSDP2_UNDISTURBED, FSDP_UNDISTURBED])
def test_a_shard_is_read_without_a_collective(
    arguments: tuple[str, ...], programs: dict[tuple[str, ...], object]
) -> None:
    output = programs[arguments].result().output  # type: ignore[attr-defined]
    assert re.findall(r"rank \d has read its part with (\d+) collectives", output) == ["0"] * 2, output


@pytest.mark.program(*FSDP2_KILLED)
def test_a_dead_ranks_missing_shard_prevents_the_save(outcome: Outcome) -> None:
    assert outcome.saved == []
    (line,) = re.findall(r"no checkpoint was saved: .*", outcome.output)
    assert line == (
        "no checkpoint was saved: rank 0: has a shard of the model, of step 11; rank 1: no answer, and no other "
        "rank has its shard of the model; this run has no earlier checkpoint"
    )
