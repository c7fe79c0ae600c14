"""A job on two hosts of four ranks each: inspected on each with a folder that they share, and then joined."""

import json
import socket
from pathlib import Path

import pytest

from lightning_ncclsafe.cli import inspect as command
from lightning_ncclsafe.cli import main
from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S, diagnosis_of
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts
from lightning_ncclsafe.inspecting.inspection import Inspection
from lightning_ncclsafe.inspecting.looks import Look, SeenFrame, SeenThread
from lightning_ncclsafe.inspecting.ranks import RankProcess

BARRIER = SeenFrame("/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 5, "barrier")
USERS = "/home/ada/train.py"
WAITS = (SeenFrame(USERS, 20, "main"), BARRIER)
HOSTS = {"node1": range(4), "node2": range(4, 8)}


def seen(rank: int, stack: tuple[SeenFrame, ...], world_size: int) -> SeenRank:
    looks = tuple(
        Look(
            at_s=at_s,
            threads=(SeenThread(is_main=True, frames=stack),),
            process=ProcessFacts(pid=rank, state="sleeping"),
        )
        for at_s in (0.0, LONG_STEP_S)
    )
    place = {"local_rank": rank % 4, "world_size": world_size, "local_world_size": 4, "job": "node1:29500", "parent": 1}
    return SeenRank(process=RankProcess(pid=100 + rank, rank=rank, **place), looks=looks)  # type: ignore[arg-type]


def inspected(
    monkeypatch: pytest.MonkeyPatch,
    evidence: Path,
    host: str,
    stacks: dict[int, tuple[SeenFrame, ...]],
    world_size: int = 8,
) -> None:
    """What ``ncclsafe inspect --output`` does on a host, but for looking."""

    def found(*_: object, **__: object) -> Inspection:
        given = {rank: stacks.get(rank, WAITS) for rank in HOSTS[host]}
        ranks = [seen(rank, stack, world_size) for rank, stack in given.items() if stack]
        return Inspection(diagnoses=(diagnosis_of(job_facts(ranks)),))

    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(command, "inspect", found)
    main(["inspect", "--output", str(evidence)])


def joined(evidence: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    main(["diagnose", str(evidence), "--format", "json"])
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def first(told: dict[str, object]) -> tuple[object, ...]:
    findings = told["findings"]
    assert isinstance(findings, list)
    return tuple(findings[0][name] for name in ("ranks", "confidence", "location"))


def test_the_rank_all_hosts_wait_for_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "train.py"
    program.write_text("def work(rank):\n    if rank == 5:\n        evaluate()\n")
    stacks = {5: (SeenFrame(str(program), 3, "work"),)}
    for host in HOSTS:
        inspected(monkeypatch, tmp_path / "evidence", host, stacks)
    told = joined(tmp_path / "evidence", capsys)
    assert first(told) == ([5], "likely", f"{program}:3 in work")
    job = told["job"]
    assert isinstance(job, dict)
    assert [(one["rank"], one["host"]) for one in job["ranks"]] == [
        (rank, host) for host, ranks in HOSTS.items() for rank in ranks
    ]
    assert not job.get("elsewhere") and not job.get("witnessed")


def test_a_host_without_evidence_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evidence" / "node2-node1-29500").mkdir(parents=True)
    inspected(monkeypatch, tmp_path / "evidence", "node1", {})
    told = joined(tmp_path / "evidence", capsys)
    unanswered = told["unanswered"]
    assert isinstance(unanswered, list)
    assert any(text.startswith("Ranks 4-7 were not inspected") for text in unanswered)
    # Whoever they wait for may be there: none of these is to blame.
    assert all(one["confidence"] == "possible" and not one["ranks"] for one in told["findings"])  # type: ignore[attr-defined]


def test_a_missing_third_host_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in HOSTS:
        inspected(monkeypatch, tmp_path / "evidence", host, {}, world_size=12)
    told = joined(tmp_path / "evidence", capsys)
    unanswered = told["unanswered"]
    assert isinstance(unanswered, list)
    assert any(text.startswith("Ranks 8-11 were not inspected") for text in unanswered)
    assert all(one["confidence"] == "possible" and not one["ranks"] for one in told["findings"])  # type: ignore[attr-defined]


def test_a_working_rank_is_named_despite_a_missing_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspected(monkeypatch, tmp_path / "evidence", "node2", {5: (SeenFrame(USERS, 30, "evaluate"),)})
    told = joined(tmp_path / "evidence", capsys)
    assert first(told)[0] == [5]


def test_a_dead_rank_on_one_host_is_named_for_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in HOSTS:
        inspected(monkeypatch, tmp_path / "evidence", host, {6: ()})
    told = joined(tmp_path / "evidence", capsys)
    assert first(told)[:2] == ([6], "possible")


def test_the_latest_inspection_of_a_host_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for works in (2, 5):
        for host in HOSTS:
            inspected(monkeypatch, tmp_path / "evidence", host, {works: (SeenFrame(USERS, 30, "evaluate"),)})
    assert first(joined(tmp_path / "evidence", capsys))[0] == [5]
