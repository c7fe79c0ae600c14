"""Starts of one job are told apart, whatever those before have left on the store."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest
from guard_of import begun
from own_threads import join_own_threads
from polling import until

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.errors import STOP_CODE, PlannedStopError
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory
from lightning_ncclsafe.facts.findings import NextStart, Plan
from lightning_ncclsafe.guard import restarts
from lightning_ncclsafe.guard.restarts import agree_on_start, follow_plan, incident_before, reason_to_stop
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.probes.process.environment import launch_words
from lightning_ncclsafe.report.json import PLAN_FILE, plan_json
from lightning_ncclsafe.strategies import guarded_call


def start(shared: SharedMemory, world_size: int, *, late_rank: int = 0, deadline_s: float = 20.0) -> list[str]:
    """What each rank calls this start; one of them comes later than all others."""
    seen: list[set[str]] = []

    def agree(rank: int) -> str:
        exchange = MemoryExchange(shared)
        return agree_on_start(
            exchange,
            rank=rank,
            world_size=world_size,
            deadline_s=deadline_s,
            clear=lambda: seen.append({*shared.values}),
        )

    with ThreadPoolExecutor(world_size) as pool:
        others = [pool.submit(agree, rank) for rank in range(world_size) if rank != late_rank]
        # The others have announced themselves, and wait; rank 0 waits for the late one.
        until(lambda: len(shared.values) >= world_size - 1)
        late = pool.submit(agree, late_rank)
        names = [future.result() for future in (*others, late)]
    assert len(seen) == 1
    return names


@pytest.mark.parametrize("late_rank", [0, 2])
def test_all_ranks_of_a_start_have_one_name_and_no_other_start_has_it(late_rank: int) -> None:
    shared = SharedMemory()
    first = start(shared, 3, late_rank=late_rank)
    second = start(shared, 3, late_rank=late_rank)
    assert len({*first}) == len({*second}) == 1
    assert first[0] != second[0]


def test_a_start_may_have_other_ranks_than_the_one_before() -> None:
    shared = SharedMemory()
    names = {start(shared, world_size)[0] for world_size in (4, 2, 3)}
    assert len(names) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    exchange = MemoryExchange()
    with pytest.raises(ExchangeError, match="ranks 1-2 did not announce a start"):
        agree_on_start(exchange, rank=0, world_size=3, deadline_s=0.05, clear=lambda: None)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "job"}
RESTARTED = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}


def leave_report(folder: Path, launch: str, *, number: int = 1) -> Path:
    incident = folder / f"2026-11-21T14-00-0{number}Z-incident-{number}"
    incident.mkdir(parents=True)
    (incident / "report.json").write_text(json.dumps({"job": {"launch": launch, "incident": {"number": number}}}))
    (incident / "report.txt").write_text(f"dead-rank: The process of rank {number} is gone.\n\nMore.\n")
    return incident


@pytest.mark.parametrize(("run", "words"), [("none", "torchrun"), ("", "torchrun"), ("4711", "torchrun 4711")])
def test_a_job_that_torchrun_has_not_named_has_no_name(run: str, words: str) -> None:
    assert launch_words({"TORCHELASTIC_RUN_ID": run}) == words


@pytest.mark.parametrize("environ", [TORCHRUN, RESTARTED])
def test_the_last_incident_of_the_start_before_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    leave_report(tmp_path, launch_words(environ))
    last = leave_report(tmp_path, launch_words(environ), number=2)
    expected = f"the previous start ended with incident 2: {last}: dead-rank: The process of rank 2 is gone."
    assert incident_before(tmp_path, environ) == expected


@pytest.mark.parametrize("environ", [{}, RESTARTED | {"SLURM_RESTART_COUNT": "0"}, RESTARTED | {"SLURM_JOB_ID": "1"}])
def test_a_first_start_names_no_other_jobs_incident(tmp_path: Path, environ: dict[str, str]) -> None:
    leave_report(tmp_path, "SLURM job 4711")
    assert incident_before(tmp_path, environ) == ""


def test_a_report_older_than_the_agent_is_of_another_job_of_that_name(tmp_path: Path) -> None:
    before_s = psutil.Process(os.getppid()).create_time() - 60
    os.utime(leave_report(tmp_path, "torchrun job"), (before_s, before_s))
    assert incident_before(tmp_path, TORCHRUN) == ""


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"job": 3}', '{"job": {"launch": "SLURM job 4711"}}'])
def test_a_report_that_cannot_be_read_is_no_trouble(tmp_path: Path, content: str) -> None:
    (leave_report(tmp_path, "") / "report.json").write_text(content)
    assert incident_before(tmp_path, RESTARTED) == ""
    assert incident_before(tmp_path / "none", RESTARTED) == ""


def test_a_program_says_once_that_it_is_watched_and_again_where_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(guarded_call, "say_on_stderr", said.append)
    monkeypatch.setattr(guarded_call, "_printed_watch", "")
    for others in ("CallExchanges", "Features", "follow_plan", "_witness"):
        monkeypatch.setattr(guarded_call, others, MagicMock())
    monkeypatch.setattr(guarded_call, "incident_before", lambda _: "the previous start ended with incident 1")

    def begin(world_size: int, folder: Path) -> None:
        strategy = MagicMock(world_size=world_size, global_rank=0, local_rank=0, parallel_devices=[0])
        call = begun(strategy, MagicMock(), report_dir=folder)
        call.connect(strategy)
        call.close()

    for _ in range(3):
        begin(2, tmp_path)
    begin(2, tmp_path / "other")
    begin(1, tmp_path / "other")
    assert [line.partition(":")[0] for line in said] == ["watching 2 ranks", "watching 2 ranks", "watching 1 rank"]
    assert ["the previous start" in line for line in said] == [True, False, False], "this start's own are not before it"


STOP = NextStart(plan=Plan.STOP, rule="diverged-collectives", answer="Rank 0 called another.", step=12, incident=1)
AGAIN = replace(STOP, plan=Plan.UNKNOWN, rule="gil-held", answer="Rank 1 holds it.")


def leave_plans(folder: Path, *starts: NextStart, launch: str = "SLURM job 4711") -> list[Path]:
    """What starts have left behind, the first one first; None of them was before this one's agent."""
    left = []
    for number, start in enumerate(starts):
        incident = folder / f"2026-11-21T14-0{number}-00Z-incident-{start.incident}"
        incident.mkdir(parents=True)
        (incident / "report.json").write_text("{}")
        opened_ns = start.opened_ns or time.time_ns()
        (incident / PLAN_FILE).write_bytes(plan_json(replace(start, launch=launch, opened_ns=opened_ns)))
        left.append(incident)
    return left


def test_a_stop_ends_the_next_start_with_the_reason_and_a_way_on(tmp_path: Path) -> None:
    (folder,) = leave_plans(tmp_path, STOP)
    reason = reason_to_stop(tmp_path, RESTARTED)
    assert "the previous start ended with diverged-collectives" in reason and "Rank 0 called another." in reason
    assert str(folder) in reason
    (folder / PLAN_FILE).unlink()
    assert reason_to_stop(tmp_path, RESTARTED) == ""


@pytest.mark.parametrize("plan", [Plan.RESTART, Plan.RESTART_WITHOUT_HOST, Plan.UNKNOWN])
def test_everything_else_lets_it_start(tmp_path: Path, plan: Plan) -> None:
    leave_plans(tmp_path, replace(STOP, plan=plan))
    assert reason_to_stop(tmp_path, RESTARTED) == ""


@pytest.mark.parametrize("environ", [{}, RESTARTED | {"SLURM_RESTART_COUNT": "0"}, RESTARTED | {"SLURM_JOB_ID": "1"}])
def test_another_jobs_stop_ends_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    leave_plans(tmp_path, STOP)
    assert reason_to_stop(tmp_path, environ) == ""


def test_a_job_that_is_named_is_the_same_in_every_pod(tmp_path: Path) -> None:
    leave_plans(tmp_path, STOP, launch="job bert")
    assert reason_to_stop(tmp_path, {"NCCLSAFE_JOB": "bert"} | TORCHRUN) != ""
    assert reason_to_stop(tmp_path, {"NCCLSAFE_JOB": "gpt"}) == ""


def test_a_plan_older_than_the_agent_is_of_another_job_of_that_name(tmp_path: Path) -> None:
    before_ns = int((psutil.Process(os.getppid()).create_time() - 60) * 1e9)
    leave_plans(tmp_path, replace(STOP, opened_ns=before_ns), launch="torchrun job")
    assert reason_to_stop(tmp_path, TORCHRUN) == ""


def test_the_third_restart_for_the_same_cause_at_the_same_step_ends(tmp_path: Path) -> None:
    leave_plans(tmp_path, AGAIN, AGAIN)
    assert reason_to_stop(tmp_path, RESTARTED) == ""
    leave_plans(tmp_path / "more", AGAIN, AGAIN, AGAIN)
    assert "the last 3 starts ended with gil-held, each at step 12" in reason_to_stop(tmp_path / "more", RESTARTED)


@pytest.mark.parametrize(
    "starts",
    [
        (AGAIN, replace(AGAIN, step=11), AGAIN, AGAIN),
        (AGAIN, replace(AGAIN, rule="data-stall"), AGAIN, AGAIN),
        (AGAIN, replace(AGAIN, incident=2), replace(AGAIN, incident=3)),
        (replace(AGAIN, rule=""),) * 4,
    ],
    ids=["another step between", "another cause between", "one start", "no cause"],
)
def test_others_than_three_alike_in_a_row_do_not(tmp_path: Path, starts: tuple[NextStart, ...]) -> None:
    leave_plans(tmp_path, *starts)
    assert reason_to_stop(tmp_path, RESTARTED) == ""


def test_a_last_incident_that_ended_nothing_plans_nothing(tmp_path: Path) -> None:
    """Whatever ended the start before, it was not what an earlier one had ended by."""
    leave_plans(tmp_path, STOP)
    later = tmp_path / "2026-11-21T15-00-00Z-incident-1"
    later.mkdir()
    (later / "report.json").write_text("{}")
    assert reason_to_stop(tmp_path, RESTARTED) == ""


def heeded(monkeypatch: pytest.MonkeyPatch, folder: Path, world_size: int) -> tuple[list[str], list[str]]:
    """What ends each rank of a start, and what is printed."""
    for name, value in RESTARTED.items():
        monkeypatch.setenv(name, value)
    shared, said = SharedMemory(), list[str]()

    def rank_ends(rank: int) -> str:
        # Each host has one rank here, and only rank 0's has the reports.
        place = Place(rank=rank, local_rank=0, world_size=world_size, local_world_size=1)
        try:
            follow_plan(MemoryExchange(shared), place, folder if rank == 0 else folder / "none", said.append)
        except PlannedStopError as stop:
            return f"{stop.code}: {stop.reason}"
        return ""

    ends = []
    for rank in range(world_size):
        # Of this process, which all ranks are a part of here.
        monkeypatch.setattr(restarts, "_has_followed", False)
        ends.append(rank_ends(rank))
    return ends, said


def test_all_ranks_follow_what_rank_0_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "wait_for_others", lambda *_: None)
    leave_plans(tmp_path, STOP)
    reason = reason_to_stop(tmp_path, RESTARTED)
    assert heeded(monkeypatch, tmp_path, 3) == ([f"{STOP_CODE}: {reason}"] * 3, [reason] * 3)
    assert heeded(monkeypatch, tmp_path / "empty", 3) == ([""] * 3, [])


def test_only_the_first_call_of_a_process_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heeded(monkeypatch, tmp_path, 1)
    leave_plans(tmp_path, STOP)
    place = Place(rank=0, local_rank=0, world_size=1, local_world_size=1)
    follow_plan(MemoryExchange(), place, tmp_path)


@pytest.mark.timeout(30)
def test_storage_of_reports_that_does_not_answer_holds_up_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(restarts, "_earlier_starts_since_s", lambda environ: answers.wait(60) and None)
    monkeypatch.setattr(restarts, "_storage", SideThread("ncclsafe-starts"))
    monkeypatch.setattr(restarts, "_READ_S", 0.05)
    try:
        ends, said = heeded(monkeypatch, tmp_path, 2)
        assert ends == ["", ""] and len(said) == 1
        assert f"left in {tmp_path} is not known, so training starts" in said[0]
        # It is not waited for once more.
        monkeypatch.setattr(restarts, "_READ_S", 60.0)
        assert incident_before(tmp_path, RESTARTED) == ""
    finally:
        answers.set()
        join_own_threads("starts")
