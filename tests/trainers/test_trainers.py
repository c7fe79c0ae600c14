"""Whole Trainer processes under each launcher: few, because each takes seconds to start.

A test is marked with the program that it looks at; those of all tests that were selected run at the same time.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm import Warm, ranks_of

import lightning_ncclsafe
from lightning_ncclsafe._torch import build
from lightning_ncclsafe.guard.ending import EXIT_CODE

PACKAGE = str(Path(lightning_ncclsafe.__file__).parent)
SCENARIO = Path(__file__).with_name("scenario.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# What starts the ranks, where Lightning does not.
LAUNCHERS = ("torchrun", "cluster")
LIMIT_S = 150
# The first test waits for its program while others start.

# Those that wait for long.
FIRST = [
    ("torchrun", "stall", "--hook", "on_train_epoch_end", "--suspect-after", "4", "--timeout", "15"),
    ("cluster", "recover", "--devices", "4", "--rank", "2", "--suspect-after", "4"),
    ("cluster", "stall", "--devices", "4", "--tensor-parallel", "2", "--rank", "2", "--timeout", "5"),
    ("cluster", "estimate", "--devices", "2", "--rank", "0"),
    ("stall", "--start-method", "fork", "--timeout", "5"),
]


@dataclass
class Outcome:
    """How a run of ``scenario.py`` ended, and what was said and written."""

    exit_code: int
    exit_codes: list[int]
    said: list[str]
    output: str
    reports: list[dict[str, Any]]
    folder: Path


def run_program(warm: Warm, folder: Path, *arguments: str) -> Outcome:
    """Runs ``scenario.py``, by a launcher if that comes first."""
    launcher, options = (arguments[0], arguments[1:]) if arguments[0] in LAUNCHERS else ("", arguments)
    argv = [*(TORCHRUN if launcher == "torchrun" else ()), str(SCENARIO), *options, f"--root-dir={folder / 'root'}"]
    ranks = ranks_of(int(options[options.index("--devices") + 1])) if launcher == "cluster" else [{}]
    # All ranks that a launcher starts as programs.
    children = 2 if launcher == "torchrun" else int(not launcher and "fork" not in options)
    codes, output = warm.run(argv, folder, timeout_s=LIMIT_S, envs=ranks, children=children)
    return ended(codes, output, folder)


def ended(codes: list[int], output: str, folder: Path) -> Outcome:
    reports = sorted((folder / "root").glob("ncclsafe/*/report.json"))
    return Outcome(
        exit_code=max(codes, key=abs),
        exit_codes=codes,
        said=[line.removeprefix("[ncclsafe] ") for line in output.splitlines() if line.startswith("[ncclsafe]")],
        output=output,
        reports=[json.loads(path.read_text()) for path in reports],
        folder=folder,
    )


def line_of(mark: str) -> str:
    lines = SCENARIO.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# <- {mark}"))
    return f"{SCENARIO}:{number} "


def first_finding(outcome: Outcome) -> dict[str, Any]:
    assert outcome.reports, outcome.output
    finding: dict[str, Any] = outcome.reports[0]["findings"][0]
    return finding


@pytest.mark.program("cluster", "nothing", "--devices", "2", "--calls", "fit", "validate", "test", "predict", "fit")
def test_healthy_calls_print_one_line_and_leave_nothing(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    (line,) = outcome.said
    assert line.startswith("watching 2 ranks")
    assert outcome.output.count("left behind: []") == 2
    assert not (outcome.folder / "root" / "ncclsafe").exists()


@pytest.mark.parametrize(
    "start_method",
    [pytest.param(one, marks=pytest.mark.program("raise", "--start-method", one)) for one in ("popen", "fork")],
)
def test_a_rank_that_raises_is_named_with_its_line(outcome: Outcome, start_method: str) -> None:
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("failed-rank", [1])
    assert finding["location"].startswith(line_of("raise"))
    assert "batch 3" in finding["summary"]
    assert outcome.exit_code != 0
    assert "ValueError: the batch is broken" in outcome.output


@pytest.mark.program("raise", "--start-method", "popen")
def test_the_users_traceback_is_printed_once_after_the_report(outcome: Outcome) -> None:
    assert outcome.output.count("Traceback (most recent call last)") == 1, outcome.output
    report, _, traceback = outcome.output.partition("Traceback (most recent call last)")
    assert "the run cannot continue" in report
    assert "[ncclsafe]" not in traceback
    files = re.findall(r'File "(.+)", line \d+', traceback)
    assert not [file for file in files if file.startswith(PACKAGE)], traceback
    assert files[-1] == str(SCENARIO)
    assert {"trainer.py", "training_epoch_loop.py"} <= {Path(file).name for file in files}, "Lightning's are left"


@pytest.mark.program("raise", "--start-method", "fork")
def test_the_launcher_raises_the_error_of_the_failed_rank(outcome: Outcome) -> None:
    assert "-- Process 1 terminated with the following error:" in outcome.output, outcome.output
    assert "CollectiveTimeoutError" not in outcome.output


@pytest.mark.program("cluster", "exit", "--devices", "3", "--rank", "2")
def test_a_silently_exiting_rank_is_reported(outcome: Outcome) -> None:
    assert (first_finding(outcome)["rule"], first_finding(outcome)["ranks"]) == ("failed-rank", [2])
    assert first_finding(outcome)["location"].startswith(line_of("exit"))
    assert "Rank 2 left the others by SystemExit with status 0 at scenario.py" in outcome.said[1]
    assert "Traceback" not in outcome.output
    assert all(outcome.exit_codes), outcome.exit_codes


@pytest.mark.program("exit", "--rank", "0")
def test_an_exit_of_the_launching_rank_is_not_a_success(outcome: Outcome) -> None:
    assert (first_finding(outcome)["rule"], first_finding(outcome)["ranks"]) == ("failed-rank", [0])
    assert outcome.exit_code == 1


@pytest.mark.program("cluster", "kill", "--devices", "2", "--rank", "0")
def test_the_others_report_the_death_of_rank_0(outcome: Outcome) -> None:
    assert (first_finding(outcome)["rule"], first_finding(outcome)["ranks"]) == ("dead-rank", [0])


@pytest.mark.program("stall", "--start-method", "fork", "--timeout", "5")
def test_forked_ranks_end_at_the_limit(outcome: Outcome) -> None:
    assert first_finding(outcome)["location"].startswith(line_of("stall"))
    assert outcome.reports[0]["job"]["incident"]["kind"] == "timeout"
    assert outcome.said[-1] == "the run cannot continue, so the guard ends it"
    assert outcome.exit_code != 0


@pytest.mark.program("torchrun", "stall", "--hook", "on_train_epoch_end", "--suspect-after", "4", "--timeout", "15")
def test_torchrun_ranks_end_at_the_limit(outcome: Outcome) -> None:
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("rank-zero-only-work", [1])
    assert "on_train_epoch_end" in finding["summary"]
    assert finding["location"].startswith(line_of("stall"))
    # Who leaves second may be woken by the end of the first one's connections; its exception says the same.
    codes = {int(code) for code in re.findall(r"exitcode  : (\d+)", outcome.output)}
    assert EXIT_CODE in codes and codes <= {EXIT_CODE, 1}, outcome.output
    assert ("CollectiveTimeoutError" in outcome.output) == (1 in codes), outcome.output
    assert outcome.exit_code != 0


@pytest.mark.program("cluster", "recover", "--devices", "4", "--rank", "2", "--suspect-after", "4")
def test_training_that_recovers_runs_to_the_end(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.output
    assert outcome.said[-1].startswith("recovered after ")
    assert first_finding(outcome)["ranks"] == [2]
    assert outcome.output.count("left behind: []") == 4


@pytest.mark.program("raise", "--devices", "1", "--rank", "0")
def test_one_device_is_guarded_without_peers(outcome: Outcome) -> None:
    assert outcome.said == [line for line in outcome.said if line.startswith("watching 1 rank:")]
    assert "ValueError: the batch is broken" in outcome.output
    assert not outcome.reports


@pytest.mark.program("cluster", "raise", "--devices", "2", "--data", "stream", "--hook", "loader")
def test_a_rank_whose_stream_raises_is_named_and_nobody_hangs(outcome: Outcome) -> None:
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("failed-rank", [1])
    assert finding["location"].startswith(line_of("raise"))
    assert outcome.exit_code != 0


@pytest.mark.program("cluster", "estimate", "--devices", "2", "--rank", "0")
def test_a_rank_without_a_loader_is_named_with_its_line(outcome: Outcome) -> None:
    finding = first_finding(outcome)
    # Its line stands under a condition on the rank: the others will never come there.
    assert (finding["rule"], finding["ranks"]) == ("unpresented-loader", [0])
    assert finding["location"].startswith(line_of("estimate"))
    assert "barrier 'run-stage'" in finding["summary"]
    assert outcome.said[-1] == "the run cannot continue, so the guard ends it"


@pytest.mark.skipif(not build.GLOO_TIMEOUT_CHANGES, reason="mesh groups keep the timeout torch gives them")
@pytest.mark.program("cluster", "stall", "--devices", "4", "--tensor-parallel", "2", "--rank", "2", "--timeout", "5")
def test_a_rank_its_mesh_neighbours_wait_for_is_named(outcome: Outcome) -> None:
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("rank-zero-only-work", [2])
    assert finding["location"].startswith(line_of("stall"))
    # Rank 0 waits in a group of the data-parallel ranks, rank 3 in one of tensor-parallel peers.
    ranks = {facts["rank"]: facts for facts in outcome.reports[0]["job"]["ranks"]}
    assert {group["name"] for facts in ranks.values() for group in facts["groups"]} > {"0"}
    assert outcome.said[-1] == "the run cannot continue, so the guard ends it"
    assert outcome.exit_code == EXIT_CODE


@pytest.mark.program("cluster", "raise", "--devices", "2", "--tensor-parallel", "1", "--keep")
def test_a_raising_rank_of_a_sharded_model_is_named_despite_saving(outcome: Outcome) -> None:
    """OnExceptionCheckpoint saves on the failed rank although all ranks hold a part of the model."""
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("failed-rank", [1])
    assert finding["location"].startswith(line_of("raise"))
    assert outcome.exit_code != 0


@pytest.mark.program("cluster", "nothing", "--devices", "2", "--tensor-parallel", "2", "--data", "stream", "--refuse")
def test_tensor_parallel_peers_with_different_data_do_not_train(outcome: Outcome) -> None:
    assert (first_finding(outcome)["rule"], first_finding(outcome)["ranks"]) == ("different-peers", [0, 1])
    assert outcome.output.count("DatasetMismatchError: different-peers: Ranks that form one data-parallel rank") == 2
    assert outcome.output.count("has made 0 steps") == 2
