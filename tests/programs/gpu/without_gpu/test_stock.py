"""What trainings without a guard have left on real NCCL, read and judged again by today's reader and rules."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import recordings
import stock

from lightning_ncclsafe.facts.findings import Confidence, Finding

# What is not right: two ranks of which each may be the wrong one, and a rank that was cut before it could report.
MISSED = ("rate_found_on_rank_zero-start-2", "sequences_passed_over_by_their_tokens-first-step-3")
# Those whose guilty line is given. What a rank does alone is in neither dumps nor logs.
LINES = {
    "archive_unpacked_on_the_first_host-start-4",
    "checkpoint_by_each_ranks_own_clock-middle-3",
    "mean_that_refuses_what_is_no_number-middle-3",
    "metric_that_one_rank_has_not_updated-validation-2",
    "pictures_shown_by_rank_zero-middle-3",
    "rate_found_on_rank_zero-start-2",
    "statistics_of_a_layer_that_was_folded-epoch-end-3",
    "worker_for_which_there_is_no_file-first-step-3",
}


def name_of(path: Path) -> str:
    return path.name.removesuffix(".json.gz")


def marked(path: Path) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason="a known miss")] if name_of(path) in MISSED else []
    return pytest.param(path, id=name_of(path), marks=marks)


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The first finding on a recording, read as files."""

    @cache
    def first(path: Path) -> Finding | None:
        folder = tmp_path_factory.mktemp("left")
        stock.laid_out(recordings.read(path), folder)
        return stock.answer(folder)

    return first


@pytest.mark.parametrize("path", map(marked, stock.files()))
def test_what_a_run_has_left_shows_the_rank(path: Path, said: Any) -> None:
    assert stock.wrong(recordings.read(path), said(path)) == []


def test_no_answer_is_wrong_and_sure(said: Any) -> None:
    """Two ranks that have called different things are certain, and not certain to be both wrong."""
    firsts = {name_of(path): said(path) for path in stock.files() if stock.wrong(recordings.read(path), said(path))}
    sure = {name for name, first in firsts.items() if first is not None and first.confidence is not Confidence.POSSIBLE}
    assert sure == {"rate_found_on_rank_zero-start-2"}


def test_lines_that_are_given(said: Any) -> None:
    given = {name_of(path) for path in stock.files() if stock.shows_line(recordings.read(path), said(path))}
    assert given == LINES


def test_there_are_recordings_with_all_dumps_with_some_and_with_none() -> None:
    """An empty folder would pass."""
    dumps = [len(recordings.read(path)["dumps"]) for path in stock.files()]
    assert len(dumps) > 30
    assert {0, 1, 2, 3} <= {*dumps}


def test_a_wrong_answer_is_seen(said: Any) -> None:
    path = stock.files()[0]
    said_of_it = stock.wrong(recordings.read(path) | {"causes": ["gc-pause"], "ranks": [77]}, said(path))
    assert [words.partition(" ")[0] for words in said_of_it] == ["kind", "ranks"]
    assert stock.wrong(recordings.read(path), None) == ["no finding"]


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (
            '  File "/opt/env/lib/python3.12/site-packages/torch/storage.py", line 1',
            "/venv/site-packages/torch/storage.py",
        ),
        ('  File "/somewhere/tests/programs/faults/training.py", line 1', "/train/tests/programs/faults/training.py"),
        ("OSError: '/tmp/fault-abc123/left.pt'", "'/run/left.pt'"),
    ],
)
def test_paths_are_those_of_no_machine(line: str, kept: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"[rank0]: {line}\nframe #0: a call in C++\n")
    left = stock.make(tmp_path, causes=("failed-rank",), ranks=(0,), place="/somewhere/train.py:7")
    assert kept in left["log"]
    assert "frame #0" not in left["log"]
    assert left["place"] == "train.py:7"


@pytest.mark.parametrize("word", ["gpu-box-17", "/home/somebody/train.py", "/scratch/data/set.bin"])
def test_nothing_of_the_host_is_in_a_recording(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-17")
    (tmp_path / "job.log").write_text(f"[rank0]: OSError: {word}\n")
    with pytest.raises(ValueError, match="which is this host's own"):
        stock.make(tmp_path, causes=(), ranks=None, place="")


@pytest.mark.parametrize(
    ("log", "is_comparable"),
    [
        ("[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: no\n", True),
        ("[rank0]:[E1 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: …\n", True),
        ("[rank1]: Traceback (most\n[rank1]: RuntimeError: No backend type associated with device type cpu\n", False),
        ("LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0]\n", False),
    ],
)
def test_a_run_is_comparable_once_something_of_it_has_failed(log: str, is_comparable: bool) -> None:
    assert stock.is_comparable(log) is is_comparable


def test_a_recording_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="bytes, 10 are allowed"):
        stock.write({"schema": 1}, tmp_path / "one.json.gz")
