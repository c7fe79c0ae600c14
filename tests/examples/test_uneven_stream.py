"""The streams of unequal length, as a user trains on them: what each policy makes of the epoch.

A test is marked with the options of the example; the trainings of all tests that were selected run at the same time.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hit_rate import HANGS
from warm import Warm, ranks_of

SCRIPT = HANGS.parent / "uneven_stream.py"
FILES_OF_RANK_0, FILES_OF_RANK_1 = 822, 616  # digits
END = "uneven-batches: The train_dataloader has ended on rank 1 after 20 batches, while rank 0 has had 21 and may"
_TRAINED = re.compile(r"rank (\d): (\d+) optimizer steps, (\d+) samples")

# Ranks need not import torch again, which is most of the time. Of those that Lightning forks, only one raises visibly.
FORK = ("--start-method", "fork")
RAISE = ("--on-uneven", "raise")
LIMIT_S = 150
FIRST: list[tuple[str, ...]] = []

Outcome = tuple[int, str, Path]


def run_program(warm: Warm, folder: Path, *options: str) -> Outcome:
    """The exit code, what was said, and the folder."""
    argv, envs = [str(SCRIPT), f"--root-dir={folder}", *options], ranks_of(2) if options == RAISE else [{}]
    codes, output = warm.run(argv, folder, timeout_s=LIMIT_S, envs=envs)
    (code,) = set(codes)
    return code, output, folder


def trained(output: str) -> dict[int, tuple[int, int]]:
    """Optimizer steps and samples, by rank."""
    return {int(rank): (int(steps), int(samples)) for rank, steps, samples in _TRAINED.findall(output)}


def finding(folder: Path) -> dict[str, Any]:
    """The one finding of the one report."""
    [path] = folder.glob("ncclsafe/*/report.json")
    [found] = json.loads(path.read_text())["findings"]
    return found


@pytest.mark.program(*RAISE)
def test_raise_names_the_ended_rank_on_all_ranks(outcome: Outcome) -> None:
    code, output, folder = outcome
    assert code == 1, output
    assert all(f"[rank{rank}]: lightning_ncclsafe.errors.UnevenDataError: {END}" in output for rank in range(2))
    assert trained(output) == {0: (19, 19 * 32), 1: (19, 19 * 32)}
    found = finding(folder)
    assert (found["rule"], found["severity"], found["ranks"]) == ("uneven-batches", "error", [1])


@pytest.mark.program("--on-uneven", "stop_together", *FORK)
def test_stop_together_drops_the_rest_of_the_longer_stream(outcome: Outcome) -> None:
    code, output, folder = outcome
    assert code == 0, output
    assert trained(output) == {0: (20, FILES_OF_RANK_0 - 182), 1: (20, FILES_OF_RANK_1)}
    assert output.count(f"[ncclsafe] {END}") == 1
    found = finding(folder)
    assert (found["rule"], found["severity"], found["ranks"]) == ("uneven-batches", "warning", [1])


@pytest.mark.program("--on-uneven", "repeat", *FORK)
def test_repeat_restarts_the_shorter_stream(outcome: Outcome) -> None:
    code, output, folder = outcome
    assert code == 0, output
    assert trained(output) == {0: (26, FILES_OF_RANK_0), 1: (26, FILES_OF_RANK_1 + 192)}
    assert output.count(f"[ncclsafe] {END}") == 1
    found = finding(folder)
    assert (found["rule"], found["severity"], found["ranks"]) == ("uneven-batches", "warning", [1])
