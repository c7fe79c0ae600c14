"""Ranks that hang, freeze and die in real processes: what is reported, and how the others end."""

import ctypes
import faulthandler
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import all_reduce, run_ranks
from torch.nn.parallel import DistributedDataParallel

from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.facts import IncidentKind
from lightning_ncclsafe.guard.ending import EXIT_CODE
from lightning_ncclsafe.strategies.launchers import EXPLAIN_S

# torch's functions that dump its recorders: NCCL's own, and that of all others.
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

HERE = Path(__file__).name


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.rstrip().endswith(f"# <- {mark}"))


def work_for_long() -> None:
    threading.Event().wait(60)  # <- working


def test_a_missing_rank_is_named_and_all_ranks_end(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 2:
            work_for_long()
        all_reduce()

    ranks = run_ranks(3, body, tmp_path)
    (diagnosis,) = ranks.diagnoses
    assert diagnosis.findings[0].ranks == (2,), (diagnosis, ranks.said)
    assert f"{HERE}:{line_of('working')} in work_for_long" in diagnosis.findings[0].location
    assert ranks.exit_codes == [EXIT_CODE] * 3
    assert ranks.said.count("the run cannot continue") == 1


def test_an_extra_call_made_long_before_is_named_with_its_line(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 0:
            dist.barrier()  # <- one too many
        dist.barrier()
        all_reduce()

    (diagnosis, *_) = run_ranks(3, body, tmp_path).diagnoses
    finding = diagnosis.findings[0]
    assert (finding.rule, finding.ranks) == ("diverged-collectives", (0,)), finding
    assert f"{HERE}:{line_of('one too many')} in body" in finding.location
    assert "which ranks 1-2 did not: since then they are one call apart" in finding.summary


def test_a_wait_on_a_subgroup_handle_is_found(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        dist.new_group([0, 1])
        later = dist.new_group([1, 2])
        all_reduce()
        if rank == 1:
            work_for_long()
        if rank == 2:
            dist.all_reduce(torch.ones(3), group=later, async_op=True).wait()

    ranks = run_ranks(3, body, tmp_path, patience_s=1)
    (diagnosis, *_) = ranks.diagnoses
    assert diagnosis.findings[0].ranks == (1,)
    assert "3 elements" in diagnosis.findings[0].summary
    assert all(facts.groups for facts in diagnosis.job.ranks)
    assert 0 not in ranks.exit_codes


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        all_reduce()

    (diagnosis, *_) = run_ranks(2, body, tmp_path).diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("stopped-process", (1,))
    assert "stopped" in diagnosis.findings[0].summary


def test_another_rank_reports_if_rank_0_and_its_store_are_stopped(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for _ in range(20):  # a training of a second, in which ranks get to know each other
            all_reduce()
            time.sleep(0.05)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        all_reduce()

    # Each call to a store whose host is stopped costs a deadline, until it is given up.
    ranks = run_ranks(3, body, tmp_path, timeout_s=8, patience_s=15)
    (diagnosis, *_) = ranks.diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("stopped-process", (0,))
    assert [facts.rank for facts in diagnosis.job.ranks] == [1, 2]
    assert ranks.exit_codes[0] == -signal.SIGKILL and ranks.exit_codes[1:] == [EXIT_CODE] * 2
    assert "rank 0 cannot end itself" in ranks.said


def test_a_rank_that_holds_the_gil_is_named_with_its_line(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 1:
            sum(itertools.repeat(1, 10**12))  # <- gil
        all_reduce()

    (diagnosis, *_) = run_ranks(2, body, tmp_path, timeout_s=6, patience_s=2, until_reported=True).diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("gil-held", (1,))
    assert f"{HERE}:{line_of('gil')}" in diagnosis.findings[0].location


def test_a_killed_rank_is_reported_before_the_launcher_kills_the_others(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce()

    ranks = run_ranks(3, body, tmp_path, launcher_kills_after_s=EXPLAIN_S)
    (diagnosis, *_) = ranks.diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("dead-rank", (1,))
    assert ranks.exit_codes == [1, -signal.SIGKILL, 1]


def test_crashed_and_silently_exited_ranks_are_dead(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 1:
            faulthandler.disable()  # pytest's, which would print this as a crash of its own
            ctypes.string_at(0)
        if rank == 2:
            os._exit(0)
        all_reduce()

    ranks = run_ranks(3, body, tmp_path)
    (diagnosis, *_) = ranks.diagnoses
    assert diagnosis.findings[0].rule == "dead-rank"
    assert diagnosis.findings[0].ranks == (1, 2)
    assert ranks.exit_codes == [1, -signal.SIGSEGV, 0]


def test_the_others_report_the_death_of_rank_0_and_its_store(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce()

    (diagnosis, *_) = run_ranks(3, body, tmp_path, launcher_kills_after_s=EXPLAIN_S).diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("dead-rank", (0,))
    assert [facts.rank for facts in diagnosis.job.ranks] == [1, 2]


def test_a_rank_that_never_joins_the_process_group_is_late(tmp_path: Path) -> None:
    # No condition on the rank: it is merely slower than the others, as one that swaps is.
    late = {0: work_for_long}

    def before_joining(rank: int) -> None:
        late.get(rank, threading.current_thread)()

    ranks = run_ranks(2, lambda rank: None, tmp_path, before_joining=before_joining, timeout_s=3, store_of_agent=True)
    (diagnosis, *_) = ranks.diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("late-at-init", (0,))
    assert f":{line_of('working')} in work_for_long" in diagnosis.findings[0].location


def test_different_collectives_with_one_sequence_number_have_diverged(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 1:
            dist.barrier()  # <- alone in the barrier
        all_reduce()

    ranks = run_ranks(2, body, tmp_path)
    assert ranks.diagnoses[0].findings[0].rule == "diverged-collectives", ranks.said


def test_all_ranks_name_a_raising_rank(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 1:
            raise ValueError("broken")  # <- raised
        all_reduce()

    ranks = run_ranks(3, body, tmp_path)
    (diagnosis,) = ranks.diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("failed-rank", (1,))
    assert f":{line_of('raised')}" in diagnosis.findings[0].location
    assert ranks.exit_codes == [1, 1, 1]
    assert ranks.said.count("ends with CollectiveTimeoutError('Rank 1 raised ValueError") == 2


def test_a_finished_rank_is_named_while_another_waits_for_it(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        # A condition on the rank would explain it by itself.
        for _ in range(2 - rank):
            all_reduce()

    ranks = run_ranks(2, body, tmp_path)
    (diagnosis,) = ranks.diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("uneven-batches", (1,))
    assert 0 not in ranks.exit_codes


def test_an_incident_during_shutdown_reaches_finished_ranks(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        all_reduce()
        if rank == 1:
            raise OSError("the last checkpoint could not be written")

    ranks = run_ranks(2, body, tmp_path)
    (diagnosis,) = ranks.diagnoses
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("failed-rank", (1,))
    assert 0 not in ranks.exit_codes


def test_ranks_that_finish_leave_nothing_behind(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for _ in range(100):
            all_reduce()

    ranks = run_ranks(3, body, tmp_path)
    assert ranks.exit_codes == [0, 0, 0]
    assert ranks.said == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said-0", "said-1", "said-2"]


@pytest.mark.parametrize("build", ["off", "without a dump"])
def test_a_run_ends_at_its_limit_without_a_recorder(
    build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a backward pass the stack alone does not show a wait for other ranks."""
    if build == "off":
        monkeypatch.setattr(recorders, "dumps", lambda **_: iter([{"version": "2.9"}]))
    for name in RECORDERS if build == "without a dump" else ():
        monkeypatch.delattr(recorders.c10d, name, raising=False)

    def body(rank: int) -> None:
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.ones(3)).backward()
        if rank == 0:
            work_for_long()
        model(torch.ones(3)).backward()

    ranks = run_ranks(2, body, tmp_path)
    diagnosis = ranks.diagnoses[-1]
    assert diagnosis.job.incident.kind is IncidentKind.TIMEOUT
    assert diagnosis.findings[0].ranks == (0,)
    assert f"{HERE}:{line_of('working')} in work_for_long" in diagnosis.findings[0].location
    assert ranks.exit_codes[1] == EXIT_CODE
    said = {"off": "has no entry", "without a dump": "cannot dump"}[build]
    assert sum(said in sentence for sentence in diagnosis.unanswered) == 1


def test_repeated_calls_in_one_hook_are_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded, and Lightning reports no progress within a hook."""
    monkeypatch.setattr(recorders, "dumps", lambda **_: iter([{"version": "2.9"}]))

    def body(rank: int) -> None:
        until = time.monotonic() + 3
        going = torch.ones(1)
        while going.item():
            if rank == 0:
                threading.Event().wait(0.05)
                going.fill_(time.monotonic() < until)
            dist.broadcast(going, 0)

    ranks = run_ranks(2, body, tmp_path, timeout_s=2.0, patience_s=10)
    assert (ranks.diagnoses, ranks.exit_codes) == ([], [0, 0])
