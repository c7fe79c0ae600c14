"""The five example hangs, as a user runs them: the first report has the right cause, ranks, and file and line."""

import json
import re
from pathlib import Path

import pytest
from hit_rate import HANGS, TRUTHS, ended, errors, first_report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_ncclsafe.ending import EXIT_CODE

# In the error of one rank: the rank, whose row it is, and that one's fingerprint.
_ROW = re.compile(r"^\[rank(\d)\]:   (\d) .* values:(\w+) ", re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in TRUTHS if name != "unseeded_split"])
def test_the_hang_is_named(name: str, tmp_path: Path) -> None:
    report = first_report(name, tmp_path)
    assert not errors(name, report), report["findings"]


def test_a_hang_ends_with_its_report_and_not_before(tmp_path: Path) -> None:
    code, output = ended(HANGS / "rank0_evaluation.py", tmp_path, "--suspect-after", "2", "--timeout", "6")
    assert code in (1, EXIT_CODE)
    assert output.count("[ncclsafe] rank-zero-only-work: Rank 0") == 2
    assert "[ncclsafe] the run cannot go on, it is ended" in output


def test_an_unseeded_split_ends_before_the_first_step(tmp_path: Path) -> None:
    # Limits that are never reached: the end does not come from them.
    limits = ["--suspect-after", "200", "--timeout", "300"]
    code, output = ended(HANGS / "unseeded_split.py", tmp_path, *limits)
    assert code == 1, output
    [folder] = tmp_path.glob("ncclsafe/*")
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


def test_offloaded_logging_does_not_notice_its_storage(tmp_path: Path) -> None:
    # Training takes a second or two; the storage stalls for longer, and the end of the run waits for it.
    code, output = ended(HANGS / "slow_log_storage.py", tmp_path, "--offload", "--stall", "3", "--suspect-after", "9")
    assert code == 0, output
    assert not list(tmp_path.glob("ncclsafe/*/report.json"))
    [said] = re.findall(r"longest write ([\d.]+) s; training waited ([\d.]+) s for it, its end ([\d.]+) s", output)
    longest_write_s, waited_s, end_s = map(float, said)
    assert waited_s < 0.1
    assert 0.3 < end_s < longest_write_s + 1
    [log_dir] = tmp_path.glob("lightning_logs/*")
    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0})
    events.Reload()
    # 22 batches an epoch, of which every tenth is logged.
    assert [point.step for point in events.Scalars("train_loss")] == [9, 19, 29, 39, 49, 59]
    assert [point.step for point in events.Scalars("val_acc")] == [21, 43, 65]
