"""Looks at real jobs, recorded: what py-spy printed of each rank's main thread, and what the kernel counted of it.

Paths were replaced when these were recorded, and variables by a digest, but for those that are read.
"""

import json
import linecache
from pathlib import Path

import pytest

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis
from lightning_ncclsafe.inspecting.diagnosing import diagnosis_of
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts
from lightning_ncclsafe.inspecting.looks import Look, threads_in
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.probes.process.main_thread import ThreadLook
from lightning_ncclsafe.report.text import render_text

LOOKS = Path(__file__).parent / "looks"


def recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    plain = json.loads((LOOKS / f"{name}.json").read_text())
    for file, text in plain["sources"].items():
        monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
    size = plain["world_size"]
    ranks = []
    for one in plain["ranks"]:
        number, pid = one["rank"], 1000 + one["rank"]
        looks = tuple(
            Look(
                at_s=each["at_s"],
                threads=threads_in(json.dumps(each["dump"]).encode(), pid),
                main_thread=ThreadLook(state=each["state"], ran_s=each["ran_s"], queued_s=each["queued_s"]),
                process=ProcessFacts(pid=pid, state=each["state"]),
            )
            for each in one["looks"]
        )
        process = RankProcess(pid=pid, rank=number, local_rank=number, world_size=size, local_world_size=size)
        ranks.append(SeenRank(process=process, looks=looks))
    return diagnosis_of(job_facts(ranks, taken_ns=1))


def test_rank_0_evaluating_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/hangs/rank0_evaluation.py with Lightning's own DDPStrategy."""
    first = recorded("rank0_evaluation", monkeypatch).findings[0]
    assert (first.rule, first.ranks) == ("rank-zero-only-work", (0,))
    assert first.location.endswith("in zero_shot_evaluation")
    assert "rank 1 waits in" in first.summary


def test_a_barrier_on_rank_0_alone_has_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier was paired with a later collective of the other rank: both wait in ModelCheckpoint, in two calls."""
    first = recorded("barrier_on_rank_zero", monkeypatch).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("diverged-collectives", (0, 1), Confidence.POSSIBLE)
    assert "barrier; rank 1 waits in" in first.summary and "in all_reduce" in first.summary


def test_a_healthy_training_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/digits.py on two ranks."""
    diagnosis = recorded("digits", monkeypatch)
    assert diagnosis.findings == ()
    assert render_text(diagnosis).startswith("Nothing found: the job makes progress.")


@pytest.mark.parametrize("path", sorted(LOOKS.glob("*.json")), ids=lambda path: path.stem)
def test_recordings_contain_no_local_paths(path: Path) -> None:
    text = path.read_text()
    files = {
        frame["filename"]
        for one in json.loads(text)["ranks"]
        for look in one["looks"]
        for thread in look["dump"]
        for frame in thread["frames"]
    }
    assert all(file.startswith(("/venv/", "/usr/lib/", "/home/ada/", "<")) for file in files), files
