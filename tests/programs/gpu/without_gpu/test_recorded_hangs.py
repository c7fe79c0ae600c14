"""What ranks gathered in hangs on real NCCL, judged again by today's rules."""

from pathlib import Path
from typing import Any

import hangs
import pytest
import recordings

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.codec import from_plain
from lightning_ncclsafe.rules.judging import judge

# What is not right, or not entirely: they wait for better rules.
MISSED = (
    "cache_that_appears_while_ranks_look_for_it-start-3@SafeDDP",
    "debugging_in_detail_on_one_host-start-2@SafeDDP",
    "outputs_gathered_by_the_one_that_speaks-validation-3@SafeDDP",
    "picture_that_one_rank_has_not-middle-3@SafeDDP",
    "pipe_whose_reader_has_gone-middle-3@SafeDDP",
    "predictions_collected_where_there_are_some-end-3@SafeDDP",
    "preparation_within_a_preparation-start-3@SafeDDP",
    "state_that_is_agreed_upon_when_it_is_read-epoch-end-3@SafeDDP",
    "tokens_sent_by_other_shares_than_agreed-middle-3@SafeDDP",
)

REPORT: dict[str, Any] = {"job": {"incident": {"number": 1}, "ranks": [{"stack": [{"file": ""}], "versions": {}}]}}


def marked(path: Path) -> Any:
    name = path.name.removesuffix(".json.gz")
    marks = [pytest.mark.xfail(strict=True, reason="a known miss")] if name in MISSED else []
    return pytest.param(path, id=name, marks=marks)


@pytest.mark.parametrize("path", map(marked, hangs.files()))
def test_a_hang_on_real_nccl_is_named(path: Path) -> None:
    assert hangs.wrong(recordings.read(path)) == []


def test_calls_that_nccl_has_paired_wrongly_are_said_to_have_completed() -> None:
    """NCCL compares nothing: here, ranks wait in vain two epochs after one of them has left out a call."""
    path = hangs.FOLDER / "expert_without_a_token_on_one_rank-middle-3@SafeModelParallel.json.gz"
    finding = judge(from_plain(JobFacts, recordings.read(path)["job"])).findings[0]
    assert "these have completed with each other, so their results are wrong; ranks 0, 2 wait in" in finding.summary


def test_there_are_hangs_of_all_strategies() -> None:
    """An empty folder would pass."""
    strategies = {path.name.removesuffix(".json.gz").partition("@")[2] for path in hangs.files()}
    assert strategies == {"SafeDDP", "SafeFSDP", "SafeModelParallel"}


def test_a_wrong_answer_is_seen() -> None:
    hang = recordings.read(hangs.files()[0])
    said = hangs.wrong(hang | {"causes": ["gc-pause"], "ranks": [77], "place": "no.py:1"})
    assert [words.partition(" ")[0] for words in said][:2] == ["cause", "ranks"]
    assert said[2].endswith("not no.py:1")


def test_nothing_of_the_host_is_in_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-17")
    report = {"job": REPORT["job"] | {"ranks": [{"host": "gpu-box-17"}]}}
    with pytest.raises(ValueError, match="'gpu-box-17'"):
        hangs.make(report, causes=(), ranks=None, place="")


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        ("/opt/env/lib/python3.12/site-packages/torch/storage.py", "/venv/site-packages/torch/storage.py"),
        ("/opt/lib/python3.12/threading.py", "/usr/lib/python3/threading.py"),
        (str(hangs._ROOT / "examples" / "a.py"), "/train/examples/a.py"),
    ],
)
def test_paths_are_those_of_no_machine(file: str, kept: str) -> None:
    report = {"job": REPORT["job"] | {"ranks": [{"stack": [{"file": file}], "versions": {"torch": "2"}}]}}
    hang = hangs.make(report, causes=("gc-pause",), ranks=(1,), place="/somewhere/train.py:7")
    assert hang["job"]["ranks"][0]["stack"][0]["file"] == kept
    assert (hang["place"], hang["versions"]) == ("train.py:7", {"torch": "2"})


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    hangs.write({"schema": 0}, tmp_path / "one.json.gz")
    with pytest.raises(ValueError, match="has schema 0, known is 1: record it again"):
        recordings.read(tmp_path / "one.json.gz")
