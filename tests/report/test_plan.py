"""plan.json: what is written is read back, and whatever else lies there says nothing and keeps nobody waiting."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from diagnoses import diagnosis

from lightning_ncclsafe.facts import IncidentKind
from lightning_ncclsafe.facts.findings import Diagnosis, NextStart, Plan
from lightning_ncclsafe.report.folder import write_report
from lightning_ncclsafe.report.json import PLAN_FILE, plan_json, plan_words, read_plan
from lightning_ncclsafe.report.text import render_text

START = NextStart(
    plan=Plan.RESTART_WITHOUT_HOST,
    rule="gpu-stuck",
    answer="The GPU of rank 3 does not get through.",
    hosts=("gpu-7",),
    step=120,
    incident=2,
    launch="SLURM job 4711",
    opened_ns=1_795_278_881_000_000_000,
)


def over(found: Diagnosis, plan: Plan = Plan.STOP) -> Diagnosis:
    """At the limit, with a first cause that says this."""
    incident = replace(found.job.incident, kind=IncidentKind.TIMEOUT)
    first = replace(found.findings[0], plan=plan)
    return replace(found, job=replace(found.job, incident=incident), findings=(first, *found.findings[1:]))


def test_a_plan_round_trips(tmp_path: Path) -> None:
    path = tmp_path / PLAN_FILE
    path.write_bytes(plan_json(START))
    assert read_plan(path) == START


def test_the_plan_is_machine_readable() -> None:
    plain = json.loads(plan_json(START))
    assert (plain["schema"], plain["plan"], plain["hosts"]) == (1, "restart-without-host", ["gpu-7"])


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / PLAN_FILE
    path.write_text(json.dumps(json.loads(plan_json(START)) | {"more": 1}))
    assert read_plan(path) == START


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"plan": "stop"}',
        b'{"schema": 2, "plan": "stop"}',
        b'{"schema": true, "plan": "stop"}',
        b'{"schema": 1}',
        b'{"schema": 1, "plan": "halt"}',
        b'{"schema": 1, "plan": "stop", "step": "many"}',
        b'{"schema": 1, "plan": "stop", "hosts": "gpu-7"}',
        b"[" * 100_000,
        b'{"schema": 1, "plan": "stop", "answer": "' + b"x" * (1 << 18) + b'"}',
    ],
    ids=lambda content: content[:40].decode(errors="replace"),
)
def test_an_invalid_plan_is_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / PLAN_FILE
    path.write_bytes(content)
    assert read_plan(path) is None


def test_pipes_links_folders_and_missing_files_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / PLAN_FILE
    assert read_plan(path) is None
    os.mkfifo(path)
    assert read_plan(path) is None
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(plan_json(START))
    path.symlink_to(tmp_path / "elsewhere")
    assert read_plan(path) is None
    path.unlink()
    path.mkdir()
    assert read_plan(path) is None


def test_escape_codes_in_a_plan_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / PLAN_FILE
    path.write_bytes(plan_json(replace(START, answer="\x1b[31mred\nline", hosts=("\x1b]0;x",))))
    read = read_plan(path)
    assert read is not None
    assert "\x1b" not in f"{read.answer}{read.hosts}{plan_words(read)}" and "\n" not in read.answer


@pytest.mark.parametrize("plan", list(Plan))
def test_each_plan_is_one_line(plan: Plan) -> None:
    words = plan_words(replace(START, plan=plan))
    assert words.startswith(plan.value.replace("-without-host", " without gpu-7")) and "\n" not in words


def test_a_finished_run_has_a_plan_beside_its_report(tmp_path: Path) -> None:
    folder = write_report(over(diagnosis()), tmp_path)
    read = read_plan(folder / PLAN_FILE)
    assert read is not None and (read.plan, read.rule) == (Plan.STOP, "rank-zero-only-work")
    assert f"\n\nNext: {plan_words(read)}.\n" in (folder / "report.txt").read_text()
    assert json.loads((folder / "report.json").read_bytes())["findings"][0]["plan"] == "stop"


def test_a_continuing_run_has_no_plan_and_removes_an_earlier_one(tmp_path: Path) -> None:
    folder = write_report(over(diagnosis()), tmp_path)
    assert (folder / PLAN_FILE).exists()
    assert write_report(diagnosis(), tmp_path) == folder
    assert not (folder / PLAN_FILE).exists()
    assert "Next: " not in render_text(diagnosis())
