"""The five example hangs, as a user runs them: the first report has the right cause, ranks, and file and line.

A test is marked with the example that it looks at; those of all tests that were selected run at the same time.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hit_rate import HANGS, TRUTHS, errors, wait_for_report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from warm import Warm

from lightning_ncclsafe.guard.ending import EXIT_CODE

# In the error of one rank: the rank, whose row it is, and that one's fingerprint.
_ROW = re.compile(r"^\[rank(\d)\]:   (\d) .* values:(\w+) ", re.MULTILINE)

# Of one example, while others run.
LIMIT_S = 150

# Limits that are never reached: the end does not come from them.
UNSEEDED = ("unseeded_split", "--suspect-after", "200", "--timeout", "300")
# Forked ranks need not import torch again, which is most of the time, and on a busy machine longer than the limit.
FORKED = ("--suspect-after", "2", "--start-method", "fork")
# The storage stalls for longer than training takes, on a machine that is not busy.
OFFLOADED = ("slow_log_storage", "--offload", "--stall", "3", "--suspect-after", "9", "--start-method", "fork")
LIMITED = ("rank0_evaluation", *FORKED, "--timeout", "6")
FIRST = [LIMITED, OFFLOADED, UNSEEDED]
# Some of them keep a core busy, and the others are not to be held up by that.
AT_ONCE = 2


@dataclass
class Outcome:
    """How an example has ended by itself, or its first report, with which it is ended."""

    folder: Path
    exit_code: int = 0
    output: str = ""
    report: dict[str, Any] | None = None


def run_program(warm: Warm, folder: Path, name: str, *options: str) -> Outcome:
    argv = [str(HANGS / f"{name}.py"), f"--root-dir={folder}", *options]
    if options != FORKED:
        (code,), output = warm.run(argv, folder, timeout_s=LIMIT_S, children=options == UNSEEDED[1:])
        return Outcome(folder, code, output)
    with (folder / "output").open("w") as file:
        program = warm.start(argv, output=file.fileno(), cwd=folder)
    try:
        return Outcome(folder, report=wait_for_report(folder))
    finally:
        program.end_session()
        program.wait(10)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.program(name, *FORKED)) for name in TRUTHS if name != UNSEEDED[0]]
)
def test_the_hang_is_named(name: str, outcome: Outcome) -> None:
    assert outcome.report is not None
    assert not errors(name, outcome.report), outcome.report["findings"]


@pytest.mark.program("late_rank0", *FORKED)
def test_the_report_shows_the_memory_growth_of_a_late_rank(outcome: Outcome) -> None:
    assert outcome.report is not None
    assert re.search(r" MB resident, growing by [\d.]+ MB/s", outcome.report["findings"][0]["summary"])


@pytest.mark.program(*LIMITED)
def test_a_hang_is_reported_before_the_guard_ends_the_run(outcome: Outcome) -> None:
    assert outcome.exit_code in (1, EXIT_CODE)
    assert outcome.output.count("[ncclsafe] rank-zero-only-work: Rank 0") == 1, outcome.output
    assert outcome.output.count("[ncclsafe] still rank-zero-only-work after ") == 1, outcome.output
    assert "[ncclsafe] the run cannot continue, so the guard ends it" in outcome.output


@pytest.mark.program(*UNSEEDED)
def test_an_unseeded_split_fails_before_the_first_step(outcome: Outcome) -> None:
    output = outcome.output
    assert outcome.exit_code == 1, output
    [folder] = outcome.folder.glob("ncclsafe/*")
    report = json.loads((folder / "report.json").read_text())
    assert not errors("unseeded_split", report), report["findings"]

    error = f"lightning_ncclsafe.errors.DatasetMismatchError: {report['findings'][0]['rule']}: The val_dataloader"
    assert all(f"[rank{rank}]: {error}" in output for rank in range(2))
    assert output.count("Numpy's random state differs between ranks") == 2
    rows = _ROW.findall(output)
    assert sorted((teller, rank) for teller, rank, _ in rows) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({fingerprint for _, _, fingerprint in rows}) == 2
    assert (folder / "report.txt").read_text().count(" values:") == 2
    # Where every rank was when it ended: Lightning comes here before it trains.
    assert output.count("in _run_sanity_check") == 2


@pytest.mark.program(*OFFLOADED)
def test_offloaded_logging_survives_slow_storage(outcome: Outcome) -> None:
    output = outcome.output
    assert outcome.exit_code == 0, output
    assert not list(outcome.folder.glob("ncclsafe/*/report.json"))
    waits = r"longest write ([\d.]+) s; training waited ([\d.]+) s for it, and the end of the run ([\d.]+) s"
    [said] = re.findall(waits, output)
    longest_write_s, waited_s, end_s = map(float, said)
    assert longest_write_s > 0.3 and waited_s < longest_write_s / 3 and end_s < longest_write_s + 1
    [log_dir] = outcome.folder.glob("lightning_logs/*")
    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0})
    events.Reload()
    # 22 batches an epoch, of which every tenth is logged.
    assert [point.step for point in events.Scalars("train_loss")] == [9, 19, 29, 39, 49, 59]
    assert [point.step for point in events.Scalars("val_acc")] == [21, 43, 65]
