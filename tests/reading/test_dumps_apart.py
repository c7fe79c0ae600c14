"""Dumps that are not of one moment of one run, which only look like a hang."""

import copy
from pathlib import Path
from typing import Any

import pytest
from made_dumps import dump, entry, idle, waiting, write

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.report.ranks import recorded_table
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

DAY_NS = 86_400 * 1_000_000_000
Made = dict[str, Any]


def judged(folder: Path) -> Diagnosis:
    evidence = Artifacts()
    evidence.read(str(folder))
    return judge(evidence.job() or pytest.fail(), RECORDED_RULES)


def first_of(folder: Path) -> tuple[Finding, JobFacts]:
    diagnosis = judged(folder)
    return diagnosis.findings[0], diagnosis.job


def shifted(made: Made, by_ns: int) -> Made:
    for one in made["entries"]:
        one["time_created_ns"] += by_ns
    return made


def test_an_older_dump_does_not_show_a_stuck_rank(tmp_path: Path) -> None:
    """The others have completed number 60, which they could not without rank 1, whose dump ends with number 40."""
    first, job = first_of(write(tmp_path, {0: waiting(), 1: idle(40), 2: waiting(), 3: waiting()}))
    assert (first.rule, first.ranks, first.confidence) == ("no-dump", (1,), Confidence.POSSIBLE)
    assert first.summary.startswith("The dumps of rank 1 are older than those of the others")
    assert job.outdated == (1,)
    assert "completed number 60, while rank 1 had reached only 40" in job.missing[0]


def test_a_moving_run_dumped_rank_by_rank_does_not_hang(tmp_path: Path) -> None:
    diagnosis = judged(write(tmp_path, {rank: waiting(100 + 60 * rank) for rank in range(4)}))
    assert (diagnosis.findings, diagnosis.job.outdated) == ((), (0, 1, 2))
    assert any("the job made progress in between" in line for line in diagnosis.unanswered)


def test_counters_alone_reveal_an_older_dump(tmp_path: Path) -> None:
    """In dumps of open entries the ended operation is unknown, and a broadcast's root may be ahead."""

    def active(seq: int) -> Made:
        return dump(entry(seq, state="scheduled"), enqueued=seq, completed=seq - 1)

    made = {0: active(61), 2: active(61), 3: active(61)}
    _, job = first_of(write(tmp_path / "a", made | {1: active(40)}))
    assert job.outdated == (1,)
    _, job = first_of(write(tmp_path / "b", made | {1: dump(enqueued=58, completed=58)}))
    assert job.outdated == ()


def test_a_completed_broadcast_root_does_not_make_others_outdated(tmp_path: Path) -> None:
    root = dump(entry(60), entry(61, op="nccl:broadcast"), enqueued=61, completed=61)
    _, job = first_of(write(tmp_path, {0: root, 1: waiting(61, op="nccl:broadcast"), 2: idle(), 3: waiting(61)}))
    assert job.outdated == ()


def test_sequence_numbers_that_include_sends_are_not_compared(tmp_path: Path) -> None:
    send = entry(0, op="nccl:send 0->1", is_p2p=True, p2p_seq_id=9)
    one = waiting()
    one["entries"].append(send)
    evidence = Artifacts()
    evidence.read(str(write(tmp_path, {0: one, 1: idle(40), 2: waiting(), 3: waiting()})))
    assert (evidence.job() or pytest.fail()).outdated == ()


def test_dumps_with_another_world_size_are_left_out(tmp_path: Path) -> None:
    small = {rank: dump(entry(9), enqueued=9, completed=9, world=2) for rank in (0, 1)}
    large = {rank: shifted(waiting(), DAY_NS) for rank in (2, 3)}
    first, job = first_of(write(tmp_path, small | large))
    assert (first.rule, first.ranks, job.world_size) == ("no-dump", (0, 1), 4)
    assert "that had 2 ranks, this one has 4" in job.missing[0]


def test_dumps_of_another_day_are_left_out(tmp_path: Path) -> None:
    made = {0: waiting(), 1: idle()} | {rank: shifted(waiting(), DAY_NS) for rank in (2, 3)}
    first, job = first_of(write(tmp_path, made))
    assert (first.rule, first.ranks) == ("no-dump", (0, 1))
    assert "more than 24 h before those of the others" in job.missing[0]


def test_a_rank_late_by_its_timeout_belongs_to_the_same_run(tmp_path: Path) -> None:
    made = {0: waiting(), 1: idle(), 2: waiting(), 3: waiting()}
    for one in made.values():
        for entry_of_one in one["entries"]:
            entry_of_one["timeout_ms"] = 2 * 3_600_000
            if entry_of_one["collective_seq_id"] <= 60:
                entry_of_one["time_created_ns"] -= 7 * 3600 * 10**9
    first, _ = first_of(write(tmp_path, made))
    assert (first.rule, first.ranks, first.confidence) == ("host-stuck", (1,), Confidence.LIKELY)


def test_the_later_of_two_runs_counts_even_if_it_is_shorter(tmp_path: Path) -> None:
    write(tmp_path / "a", {0: waiting(500), 1: idle(499), 2: waiting(500), 3: waiting(500)})
    later = {0: waiting(), 1: waiting(), 2: idle(), 3: waiting()}
    write(tmp_path / "b", {rank: shifted(made, DAY_NS) for rank, made in later.items()})
    first, job = first_of(tmp_path)
    assert (first.rule, first.ranks) == ("host-stuck", (2,))
    (said,) = job.missing
    assert said.startswith("There are two dumps of ranks 0-3, ")


def test_a_rank_that_joined_at_the_timeout_is_named(tmp_path: Path) -> None:
    late = waiting()
    late["entries"][-1]["time_created_ns"] += 599 * 10**9
    first, _ = first_of(write(tmp_path, {0: waiting(), 1: waiting(), 2: late, 3: waiting()}))
    assert (first.rule, first.ranks, first.confidence) == ("all-joined", (2,), Confidence.POSSIBLE)
    assert "9 min 59 s after the first" in first.summary and "link or a device" not in first.summary


def test_without_a_timeout_links_are_blamed_conditionally(tmp_path: Path) -> None:
    first, _ = first_of(write(tmp_path, {rank: waiting() for rank in range(4)}))
    assert first.summary.endswith(
        "it did not complete: if they had waited there for long, a link or a device is at fault, not the training code."
    )


@pytest.mark.parametrize("early", [waiting(), idle(40)], ids=["waits", "idle"])
def test_a_dump_of_an_earlier_start_is_left_out(early: Made, tmp_path: Path) -> None:
    """It is an hour older than the others' last calls, the timeout is ten minutes, and its number does not match."""
    others = {rank: waiting(65) for rank in (0, 2, 3)}
    for made in others.values():
        made["entries"].insert(0, entry(40))
    first, job = first_of(write(tmp_path, others | {1: shifted(copy.deepcopy(early), -3600 * 10**9)}))
    assert (first.rule, first.ranks, first.confidence) == ("no-dump", (1,), Confidence.POSSIBLE)
    assert first.summary.startswith("The dump of rank 1 is not of this run and rank")
    assert (job.left_out, job.outdated) == ((1,), ())
    assert "nothing of it was read" not in " ".join(recorded_table(job))


@pytest.mark.parametrize(("dumped", "rule"), [(idle(), "host-stuck"), (waiting(60), "gpu-stuck")])
def test_a_dump_with_matching_numbers_may_have_another_clock(dumped: Made, rule: str, tmp_path: Path) -> None:
    early = shifted(copy.deepcopy(dumped), -3600 * 10**9)
    first, job = first_of(write(tmp_path, {0: waiting(), 1: early, 2: waiting(), 3: waiting()}))
    assert (first.rule, first.ranks, first.confidence, job.left_out) == (rule, (1,), Confidence.POSSIBLE, ())


def test_host_clocks_may_differ_by_minutes(tmp_path: Path) -> None:
    first, job = first_of(write(tmp_path, {0: waiting(), 1: shifted(idle(), -600 * 10**9), 2: waiting(), 3: waiting()}))
    assert (first.rule, first.ranks, job.left_out) == ("host-stuck", (1,), ())


def of_pair(low: int, seq: int, state: str) -> Made:
    """A dump of one of two ranks, which have a group of their own."""
    made = dump(entry(seq, state=state, pg_id=1, process_group=("7", "tp")), enqueued=0, completed=0)
    made["pg_status"] = {
        "1": {"last_enqueued_collective": seq, "last_completed_collective": seq - (state != "completed")}
    }
    made["pg_config"] = {"7": {"name": "7", "desc": "tp", "ranks": f"[{low}, {low + 1}]"}}
    return made


def test_a_dump_named_after_a_non_member_is_left_out(tmp_path: Path) -> None:
    made = {0: of_pair(0, 9, "scheduled"), 1: of_pair(2, 8, "completed"), 2: of_pair(2, 9, "scheduled")}
    first, job = first_of(write(tmp_path, made | {3: of_pair(2, 9, "scheduled")}))
    assert (first.rule, first.ranks, first.confidence) == ("no-dump", (1,), Confidence.POSSIBLE)
    assert job.left_out == (1,)
    assert "their process groups are not those of the ranks in their file names" in job.missing[0]


def test_a_send_reveals_its_calling_rank(tmp_path: Path) -> None:
    send = entry(0, op="nccl:send 2->3", is_p2p=True, p2p_seq_id=1)
    other = waiting()
    other["entries"].insert(0, send)
    assert first_of(write(tmp_path, {0: waiting(), 1: other, 2: waiting(), 3: waiting()}))[1].left_out == (1,)


def test_file_names_counted_from_one_name_no_rank(tmp_path: Path) -> None:
    diagnosis = judged(write(tmp_path, {rank + 1: idle() if rank == 2 else waiting() for rank in range(4)}))
    assert diagnosis.findings == ()
    assert "not those of the job: rank 4 of 4 ranks" in diagnosis.job.missing[0]


def test_an_overtaken_device_is_only_possibly_at_fault(tmp_path: Path) -> None:
    """They have completed number 62, which rank 1 has not called: its dump may be older, or 62 a broadcast from 0."""
    ahead = dump(enqueued=62, completed=62)
    held = dump(entry(61, state="scheduled"), enqueued=61, completed=60)
    first, _ = first_of(write(tmp_path / "a", {0: ahead, 1: held, 2: ahead, 3: ahead}))
    assert (first.rule, first.ranks, first.confidence) == ("gpu-stuck", (1,), Confidence.POSSIBLE)
    level = dump(enqueued=61, completed=61)
    first, _ = first_of(write(tmp_path / "b", {0: level, 1: held, 2: level, 3: level}))
    assert (first.rule, first.ranks, first.confidence) == ("gpu-stuck", (1,), Confidence.LIKELY)


@pytest.mark.parametrize(("moving", "confidence"), [(1, Confidence.LIKELY), (2, Confidence.POSSIBLE)])
def test_a_device_is_only_possibly_at_fault_while_several_ranks_move(
    moving: int, confidence: Confidence, tmp_path: Path
) -> None:
    """Their number 61 has just ended, and they have called the next; a stuck watchdog leaves the same on one rank."""

    def passed(*, retired: bool) -> Made:
        calls = entry(60), entry(61, retired=retired), entry(62, state="scheduled")
        return dump(*calls, enqueued=62, completed=60 + retired, world=8)

    made = {rank: passed(retired=rank >= 2 + moving) for rank in range(2, 8)} | {0: passed(retired=True)}
    made[1] = dump(entry(60), entry(61, state="scheduled"), enqueued=61, completed=60, world=8)
    first, _ = first_of(write(tmp_path, made))
    assert (first.rule, first.ranks, first.confidence) == ("gpu-stuck", (1,), confidence)
