"""Starts of one job are told apart, whatever those before have left on the store."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory
from lightning_ncclsafe.guard.restarts import agree_on_start, incident_before, launch_words
from lightning_ncclsafe.settings import check_limits
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
        give_up = time.monotonic() + 10
        # The others have said that they are there, and wait; rank 0 waits for the late one.
        while len(shared.values) < (world_size - 1) and time.monotonic() < give_up:
            time.sleep(0.001)
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


def test_who_does_not_come_is_named() -> None:
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
    monkeypatch.setattr(guarded_call, "_said_watch", "")
    monkeypatch.setattr(guarded_call, "incident_before", lambda _: "the previous start ended with incident 1")

    def begin(world_size: int, folder: Path) -> None:
        one = guarded_call.GuardedCall.__new__(guarded_call.GuardedCall)
        one._limits, one._report_dir = check_limits(None, 100.0, "abort"), folder
        one._say_watch(world_size)

    for _ in range(3):
        begin(2, tmp_path)
    begin(2, tmp_path / "other")
    begin(1, tmp_path / "other")
    assert [line.partition(":")[0] for line in said] == ["watching 2 ranks", "watching 2 ranks", "watching 1 rank"]
    assert ["the previous start" in line for line in said] == [True, False, False], "this start's own are not before it"
