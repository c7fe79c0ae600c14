"""Whole Trainer processes under each launcher: few, because each takes seconds to start."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.ending import EXIT_CODE

SCENARIO = Path(__file__).with_name("scenario.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass
class Outcome:
    """How a run of ``scenario.py`` ended, and what was said and written."""

    exit_code: int
    said: list[str]
    output: str
    reports: list[dict[str, Any]]


def run(folder: Path, deed: str, *options: str, launcher: tuple[str, ...] = ()) -> Outcome:
    command = [sys.executable, *launcher, str(SCENARIO), deed, "--root-dir", str(folder / "root"), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        # Ends when the last of the ranks has closed its output, also when the first one has left before.
        output, _ = process.communicate(timeout=45)
    finally:
        end_session(process.pid)
    reports = sorted((folder / "root").glob("ncclsafe/*/report.json"))
    return Outcome(
        exit_code=process.returncode,
        said=[line.removeprefix("[ncclsafe] ") for line in output.splitlines() if line.startswith("[ncclsafe]")],
        output=output,
        reports=[json.loads(path.read_text()) for path in reports],
    )


def end_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def line_of(mark: str) -> str:
    lines = SCENARIO.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# <- {mark}"))
    return f"{SCENARIO}:{number} "


def first_finding(outcome: Outcome) -> dict[str, Any]:
    assert outcome.reports, outcome.output
    finding: dict[str, Any] = outcome.reports[0]["findings"][0]
    return finding


def test_healthy_calls_say_one_line_each_and_leave_nothing(tmp_path: Path) -> None:
    outcome = run(tmp_path, "nothing", "--calls", "fit", "validate", "test", "predict", "fit")
    assert outcome.exit_code == 0, outcome.output
    assert len(outcome.said) == 5, outcome.said
    assert all(line.startswith("watching 2 ranks") for line in outcome.said)
    assert outcome.output.count("left behind: []") == 2
    assert not (tmp_path / "root" / "ncclsafe").exists()


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_a_rank_that_raises_is_named_with_its_line(tmp_path: Path, start_method: str) -> None:
    outcome = run(tmp_path, "raise", "--start-method", start_method)
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("failed-rank", [1])
    assert finding["location"].startswith(line_of("raise"))
    assert "batch 3" in finding["summary"]
    assert outcome.exit_code != 0
    assert "ValueError: the batch is broken" in outcome.output


def test_a_rank_that_exits_silently_is_no_silent_end(tmp_path: Path) -> None:
    outcome = run(tmp_path, "exit", "--devices", "3", "--rank", "2")
    assert (first_finding(outcome)["rule"], first_finding(outcome)["ranks"]) == ("failed-rank", [2])
    assert outcome.exit_code != 0


def test_the_death_of_rank_0_is_reported_by_the_others(tmp_path: Path) -> None:
    outcome = run(tmp_path, "kill", "--rank", "0")
    assert (first_finding(outcome)["rule"], first_finding(outcome)["ranks"]) == ("dead-rank", [0])


def test_fork_and_the_limit(tmp_path: Path) -> None:
    outcome = run(tmp_path, "stall", "--start-method", "fork", "--timeout", "5")
    assert first_finding(outcome)["location"].startswith(line_of("stall"))
    assert outcome.reports[0]["job"]["incident"]["kind"] == "timeout"
    assert outcome.said[-1] == "the run cannot go on, it is ended"
    assert outcome.exit_code != 0


def test_torchrun_and_the_limit(tmp_path: Path) -> None:
    outcome = run(tmp_path, "stall", "--hook", "on_train_epoch_end", "--timeout", "10", launcher=TORCHRUN)
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("rank-zero-only-work", [1])
    assert "on_train_epoch_end" in finding["summary"]
    assert finding["location"].startswith(line_of("stall"))
    assert outcome.output.count(f"exitcode  : {EXIT_CODE}") == 2, outcome.output
    assert outcome.exit_code != 0


def test_training_that_recovers_goes_on_to_the_end(tmp_path: Path) -> None:
    outcome = run(tmp_path, "recover", "--devices", "4", "--rank", "2", "--suspect-after", "4")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.said[-1].startswith("recovered after ")
    assert first_finding(outcome)["ranks"] == [2]
    assert outcome.output.count("left behind: []") == 4


def test_one_device_is_guarded_without_peers(tmp_path: Path) -> None:
    outcome = run(tmp_path, "raise", "--devices", "1", "--rank", "0")
    assert outcome.said == [line for line in outcome.said if line.startswith("watching 1 rank:")]
    assert "ValueError: the batch is broken" in outcome.output
    assert not outcome.reports


def test_a_rank_whose_stream_raises_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    outcome = run(tmp_path, "raise", "--data", "stream", "--hook", "loader")
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("failed-rank", [1])
    assert finding["location"].startswith(line_of("raise"))
    assert outcome.exit_code != 0


def test_sigterm_to_one_rank_stops_all_before_the_same_batch_where_ranks_vote(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sigterm", "--data", "stream", "--rank", "1", "--devices", "3")
    steps = re.findall(r"rank (\d) has made (\d+) steps", outcome.output)
    assert {rank for rank, _ in steps} == {"0", "1", "2"}
    assert len({made for _, made in steps}) == 1, steps
    assert 3 < int(steps[0][1]) < 16, "after the batch of the signal, and before the end of the epoch"
    assert "done" not in outcome.output


def test_a_rank_that_presents_no_loader_is_named_with_what_it_does_instead(tmp_path: Path) -> None:
    outcome = run(tmp_path, "estimate", "--rank", "0")
    finding = first_finding(outcome)
    assert (finding["rule"], finding["ranks"]) == ("unpresented-loader", [1])
    assert finding["location"].startswith(line_of("estimate"))
    assert "barrier 'run-stage'" in finding["summary"]
    assert outcome.said[-1] == "the run cannot go on, it is ended"
