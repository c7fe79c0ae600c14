"""What is said of ranks that wait for the lock on a file, by who holds it, and of the ranks that hold one."""

from dataclasses import replace

import pytest
from builders import FETCH, GLOO, NCCL, Backend, job, process, user

from lightning_ncclsafe.facts import (
    FileLockFacts,
    Frame,
    JobFacts,
    LockHolder,
    MachineFacts,
    MainThreadFacts,
    Phase,
    ProcessFacts,
    RankFacts,
)
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding, Plan
from lightning_ncclsafe.rules.expected_waits import expected_for_s
from lightning_ncclsafe.rules.judging import judge

PATH = "/cache/x.lock"
START = {"phase": Phase.INIT, "batch": -1, "world": 2}
SETUP = {"action": "[LightningDataModule]Data.setup", **START}
OUTSIDE = LockHolder(pid=708, command="python other.py")


def at_lock(
    rank: int, *holders: LockHolder, path: str = PATH, certain: bool = True, net: Backend = GLOO, **lock: object
) -> RankFacts:
    """A rank that waits for the lock in DataModule.setup."""
    facts = net.working(rank, user("fetch", 12, code="fcntl.flock(file, fcntl.LOCK_EX)"), seq=1, **SETUP)
    wanted = FileLockFacts(path=path, holders=holders, is_certain=certain, **lock)  # type: ignore[arg-type]
    return replace(facts, file_lock=wanted)


def waits_at(facts: RankFacts) -> str:
    frame = facts.stack[-1]
    return f"{frame.file}:{frame.line} in {frame.function}"


def rank_process(rank: int) -> LockHolder:
    return LockHolder(pid=1000 + rank, command="python train.py", parents=(1,))


def downloading(rank: int = 0, **more: object) -> RankFacts:
    return GLOO.working(rank, user("fetch", 13), seq=1, **(SETUP | more))


def told(facts: JobFacts) -> Diagnosis:
    diagnosis = judge(facts)
    assert not [line for line in diagnosis.unanswered if "failed" in line]
    return diagnosis


def first(*ranks: RankFacts, world: int = 2, witnessed: tuple[ProcessFacts, ...] = ()) -> Finding:
    return told(job(*ranks, world=world, witnessed=witnessed)).findings[0]


@pytest.mark.parametrize(("holder", "quiet_s"), [(1, 0), (0, 40)])
def test_a_lock_that_a_rank_has_itself_is_reported_at_once(holder: int, quiet_s: float) -> None:
    """Even in the first batch: no time mends it."""
    waits = replace(at_lock(1, rank_process(holder)), progress=GLOO.working(1, seq=1, batch=0).progress)
    facts = job(GLOO.waiting(0, seq=2, batch=0, idle=20.0), waits, world=2)
    incident = replace(facts.incident, idle_s=20.0, suspect_after_s=20.0)
    assert expected_for_s(replace(facts, incident=incident), lambda _: 1800.0) == quiet_s


def test_a_lock_taken_twice_is_the_fault_of_whoever_takes_it_again_and_of_nobody_in_line() -> None:
    enter = Frame(file="/usr/lib/python3.12/contextlib.py", line=137, function="__enter__")
    waits = at_lock(1, rank_process(1))
    again = replace(waits, stack=(*waits.stack[:-1], user("extend", 47), enter, *waits.stack[-1:]))
    finding = first(at_lock(0, rank_process(1)), again)
    assert (finding.rule, finding.ranks) == ("file-lock", (1,))
    assert finding.location.endswith("train.py:47 in extend")
    assert "its own process holds it already, while rank 0 waits in line" in finding.summary
    # Without a helper, it is the line that takes the lock.
    assert first(at_lock(0, rank_process(1)), waits).location.endswith("train.py:12 in fetch")


def test_a_rank_that_works_under_a_lock_is_named_with_its_line() -> None:
    """No rank is in a collective: one downloads for minutes, the other waits for its lock."""
    diagnosis = told(job(downloading(), at_lock(1, rank_process(0)), world=2))
    only = diagnosis.findings[0]
    assert [finding.rule for finding in diagnosis.findings] == ["late-at-init"]
    assert (only.ranks, only.confidence) == ((0,), Confidence.LIKELY)
    assert only.location.endswith("train.py:13 in fetch")
    assert only.summary == (
        "Rank 0 is late: still in Data.setup at train.py:13 in fetch, before the first batch, for 23 s, while rank 1 "
        "waits in line for the lock on /cache/x.lock, which rank 0 holds."
    )
    assert [item.text for item in only.evidence if item.source == "file lock"] == [
        "Waits for the lock on /cache/x.lock, at train.py:12 in fetch: rank 0 holds it."
    ]


def test_work_under_a_lock_later_in_training_is_a_file_lock() -> None:
    options = {"world": 2, "action": "[LightningModule]Net.training_step"}
    holder = GLOO.working(0, user("cache", 30), seq=60, **options)
    waiting = replace(
        GLOO.working(1, user("cache", 28), seq=60, **options), file_lock=at_lock(1, rank_process(0)).file_lock
    )
    finding = first(holder, waiting)
    assert (finding.rule, finding.ranks, finding.confidence) == ("file-lock", (0,), Confidence.LIKELY)
    assert finding.location.endswith("train.py:30 in cache")
    assert finding.summary.startswith(
        "Rank 0 holds a file lock, in Net.training_step at train.py:30 in cache, batch 11"
    )
    assert finding.plan is Plan.UNKNOWN


@pytest.mark.parametrize("net", [GLOO, NCCL], ids=lambda net: net.name)
def test_a_lock_held_into_a_barrier_is_a_deadlock(net: Backend) -> None:
    holder = net.in_barrier(0, "cached", seq=2, **START)
    finding = first(holder, at_lock(1, rank_process(0), net=net))
    assert (finding.rule, finding.ranks, finding.confidence) == ("file-lock", (1,), Confidence.LIKELY)
    assert "rank 0 holds it, and rank 0 waits in Lightning's barrier 'cached'" in finding.summary
    assert finding.summary.endswith("for rank 1: none of them can continue.")
    assert finding.plan is Plan.STOP
    # A loop that tries again and again is in no system call.
    assert first(holder, at_lock(1, rank_process(0), net=net, certain=False)).rule == "file-lock"


@pytest.mark.parametrize(("left", "is_there"), [(True, False), (True, True), (False, False)])
def test_who_has_left_a_transaction_open_is_at_fault_unless_it_is_in_the_same_function(
    left: bool, is_there: bool
) -> None:
    """There, the holder waits in its transaction for those that wait for it to begin theirs."""
    place = "/home/me/project/store.py:45 in open_run"
    waits = at_lock(1, rank_process(0), path="/run/scores.db", certain=False, left_open_at=place if left else "")
    holder = GLOO.in_barrier(0, "written", seq=2, **START)
    if is_there:
        holder = replace(holder, stack=(*holder.stack[:-1], user("fetch", 13), *holder.stack[-1:]))
    finding = first(holder, waits)
    is_blamed = left and not is_there
    sentence = " The transaction that is begun at store.py:45 in open_run may have been left open."
    assert (sentence in finding.summary) == is_blamed
    assert (finding.ranks, finding.location) == (((0,), place) if is_blamed else ((1,), waits_at(waits)))
    assert (finding.confidence, finding.plan) == (Confidence.LIKELY, Plan.STOP)


def test_a_transaction_is_not_left_open_where_a_child_process_holds_the_lock() -> None:
    child = LockHolder(pid=812, command="python writer.py", parents=(1000, 1))
    waits = at_lock(1, child, left_open_at="/home/me/project/store.py:45 in open_run")
    finding = first(GLOO.in_barrier(0, "written", seq=2, **START), waits)
    assert (finding.ranks, finding.location) == ((0,), waits_at(waits))
    assert "open_run" not in finding.summary


def test_a_holder_that_waits_for_another_rank_is_no_circle_by_itself() -> None:
    """Nothing is known of what the holder waits for: no recorder counts."""
    holder = replace(GLOO.in_barrier(0, "cached", seq=2, **START), groups=(), collectives=())
    finding = first(holder, at_lock(1, rank_process(0)))
    assert (finding.rule, finding.confidence) == ("file-lock", Confidence.LIKELY)
    assert "can go on" not in finding.summary


def test_two_locks_that_are_taken_crosswise_are_a_circle() -> None:
    ranks = at_lock(0, rank_process(1), path="/cache/a.lock"), at_lock(1, rank_process(0), path="/cache/b.lock")
    finding = first(*ranks)
    assert (finding.rule, finding.ranks, finding.confidence) == ("file-lock", (0, 1), Confidence.LIKELY)
    assert "Rank 0 waits in line for the lock on /cache/a.lock, which rank 1 holds" in finding.summary
    assert "rank 1 waits in line for the lock on /cache/b.lock, which rank 0 holds" in finding.summary


def test_the_last_holder_in_a_chain_of_locks_is_named() -> None:
    ranks = downloading(0, world=3), at_lock(1, rank_process(0)), at_lock(2, rank_process(1), path="/cache/b.lock")
    finding = first(*ranks, world=3)
    assert (
        finding.ranks == (0,) and "rank 2 waits in line for the lock on /cache/b.lock, which rank 1" in finding.summary
    )


def test_a_process_of_another_job_is_reported_with_its_command() -> None:
    finding = first(at_lock(0, OUTSIDE), at_lock(1, OUTSIDE))
    assert (finding.rule, finding.ranks, finding.confidence) == ("file-lock", (0, 1), Confidence.LIKELY)
    assert "process 708 (python other.py), which is no rank of this job, holds it" in finding.summary
    assert finding.plan is Plan.UNKNOWN


def test_a_lock_of_another_job_explains_why_a_rank_is_late() -> None:
    waiting = GLOO.in_barrier(0, "post_setup", seq=2, **START)
    diagnosis = told(job(waiting, at_lock(1, OUTSIDE), world=2))
    assert [(finding.rule, finding.ranks) for finding in diagnosis.findings] == [("file-lock", (1,))]
    assert "while rank 0 waits in" in diagnosis.findings[0].summary


def test_a_child_of_a_rank_is_reported_with_that_rank() -> None:
    child = LockHolder(pid=812, command="sleep 120", parents=(1000, 1))
    finding = first(downloading(), at_lock(1, child))
    assert finding.ranks == (0,)
    assert finding.summary.endswith("for the lock on /cache/x.lock, which process 812 of rank 0 holds.")
    evidence = [item.text for item in finding.evidence if item.source == "file lock"]
    assert evidence[0].endswith("process 812 (sleep 120), which rank 0 has started, holds it.")


def test_a_rank_that_waits_for_those_that_its_child_keeps_from_a_lock_is_the_one() -> None:
    """The child is the worker of a dataloader, say, which was forked while the rank held the lock."""
    child = LockHolder(pid=812, command="python train.py", parents=(1000, 1))
    finding = first(GLOO.in_barrier(0, "cached", seq=2, **START), at_lock(1, child))
    assert (finding.rule, finding.ranks, finding.plan) == ("file-lock", (0,), Plan.STOP)
    assert "process 812 of rank 0 holds it, and rank 0 waits in" in finding.summary
    assert finding.location.endswith("in fetch") and finding.remedy.startswith("Start no process")


def test_the_nearest_rank_among_the_parents_is_the_one() -> None:
    """Lightning's rank 0 has started rank 1: what that one starts is not of rank 0."""
    child = LockHolder(pid=812, parents=(1001, 1000, 1))
    finding = first(GLOO.in_barrier(0, "cached", seq=2, **START), at_lock(1, child))
    assert finding.ranks == (1,) and "process 812, which it has started, holds it" in finding.summary
    # Python's files are not inherited by other programs: that one has taken it itself.
    assert finding.remedy.startswith("Wait until that program has ended")


def test_a_lock_that_the_process_holds_itself() -> None:
    waiting = GLOO.in_barrier(0, "cached", seq=2, **START)
    finding = first(waiting, at_lock(1, rank_process(1)))
    assert (finding.rule, finding.ranks) == ("file-lock", (1,))
    assert "its own process holds it already" in finding.summary
    inherited = first(waiting, at_lock(1, rank_process(1), LockHolder(pid=812, command="sleep 120")))
    assert "has taken it, and process 812 (sleep 120) has the file open, too" in inherited.summary


def test_the_holder_of_a_lock_on_another_host_is_unknown_unless_it_is_a_rank() -> None:
    waiting = GLOO.in_barrier(0, "cached", seq=2, **START)
    unknown = first(waiting, at_lock(1))
    assert (unknown.rule, unknown.ranks) == ("file-lock", (1,))
    assert "who holds it is not shown here" in unknown.summary
    there = replace(downloading(), host="node-2", held_locks=(PATH,))
    assert first(there, at_lock(1, is_on_network=True)).ranks == (0,)
    # On a local disk, it is another file.
    assert first(there, at_lock(1)).ranks == (1,)
    # The same path on its own host would be listed there.
    here = replace(downloading(), held_locks=(PATH,))
    assert first(here, at_lock(1)).rule == "file-lock"


@pytest.mark.parametrize(("age_s", "words"), [(7200.0, "the file exists for 2 h"), (3.0, "the file exists, and")])
def test_a_lock_file_that_nobody_has_open_may_be_left_behind(age_s: float, words: str) -> None:
    waiting = GLOO.in_barrier(0, "cached", seq=2, **START)
    finding = first(waiting, at_lock(1, by_existence=True, age_s=age_s))
    assert (finding.rule, finding.confidence) == ("file-lock", Confidence.LIKELY)
    assert words in finding.summary and "may have left it" in finding.summary
    assert "remove the file" in finding.remedy


def test_a_rank_that_only_may_wait_for_a_lock_of_other_jobs_is_not_named() -> None:
    waiting = GLOO.in_barrier(0, "post_setup", seq=2, **START)
    diagnosis = told(job(waiting, at_lock(1, OUTSIDE, certain=False), world=2))
    assert [finding.rule for finding in diagnosis.findings] == ["late-at-init"]


@pytest.mark.parametrize(("ran_s", "causes"), [(0.1, ["file-lock"]), (6.0, ["late-at-init"])])
def test_a_rank_that_computes_takes_locks_for_moments_only(ran_s: float, causes: list[str]) -> None:
    waiting = GLOO.in_barrier(0, "post_setup", seq=2, **START)
    busy = MachineFacts(main_thread=MainThreadFacts(over_s=10.0, ran_s=ran_s, queued_s=0.0))
    diagnosis = told(job(waiting, replace(at_lock(1, OUTSIDE), machine=busy), world=2))
    assert [finding.rule for finding in diagnosis.findings] == causes


def test_a_holder_that_died_or_is_stopped_is_the_cause() -> None:
    waiting = replace(at_lock(1, rank_process(0)), peers=(process(0, "stopped"),))
    assert first(waiting, witnessed=(process(0, "stopped"),)).rule == "stopped-process"


def test_ranks_that_compute_under_a_condition_keep_their_cause() -> None:
    """Rank 0 tokenises under a condition, with the lock that rank 1 waits for."""
    line = user("setup", 18, condition="if self.trainer.is_global_zero:  (line 17)")
    finding = first(GLOO.working(0, line, FETCH, seq=1, **SETUP), at_lock(1, rank_process(0)))
    assert finding.ranks == (0,)
    assert finding.rule in ("rank-zero-only-work", "file-lock")


def test_the_summary_says_all_about_the_lock_of_the_first_rank() -> None:
    waiting = GLOO.waiting(0, seq=2, phase=Phase.INIT, batch=-1, world=2)
    alone = first(waiting, at_lock(1, OUTSIDE))
    assert PATH in alone.summary and not [item for item in alone.evidence if item.source == "file lock"]
    both = first(at_lock(0, OUTSIDE), at_lock(1, OUTSIDE))
    assert [item.rank for item in both.evidence if item.source == "file lock"] == [1]
