"""Facts of which a part is missing, or which name several things at once: rules answer from the rest, or not at all."""

from dataclasses import replace

import call_scenes
import machine_scenes
import pytest
from builders import (
    ALL_REDUCE,
    ENGINE,
    GLOO,
    job,
    process,
    raised,
    user,
)
from judged import first

from lightning_ncclsafe.facts import (
    CaughtException,
    Collective,
    Frame,
    Group,
    IncidentKind,
    InspectionFacts,
    JobFacts,
    MachineFacts,
    RankFacts,
    RecordFacts,
    StepFacts,
    ThreadLockFacts,
)
from lightning_ncclsafe.facts.findings import Confidence, Plan
from lightning_ncclsafe.rules.hang.blocked_on_disk import blocked_on_disk
from lightning_ncclsafe.rules.hang.skipped_step import skipped_step
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.machine import ailment
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

WHAT = "what(): [enforce fail at gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 9612 vs 8"
QUEUE_GET = Frame(file="/usr/lib/python3.12/queue.py", line=171, function="get")
CONDITION = Frame(file="/usr/lib/python3.12/threading.py", line=355, function="wait")


def test_an_abort_of_gloo_is_told_although_nobody_answers() -> None:
    """It is not known then whether the call or only its size was another one."""
    seen = (process(0, "gone", ended_by="SIGABRT", said=WHAT), process(1, "gone"))
    diagnosis = judge(job(world=2, witnessed=seen))
    assert diagnosis.unanswered == ("No rank answered, so nothing is known about any of them.",)
    finding = diagnosis.findings[0]
    assert (finding.rule, finding.confidence) == ("mismatched-collective", Confidence.POSSIBLE)
    assert finding.ranks == (0, 1)
    assert finding.summary.endswith("it was sent 9,612 bytes at once and had room for 8.")


def recorded(rank: int) -> RankFacts:
    call = Collective(group="dp", seq=8, op="all_reduce", backend="gloo", input_sizes=((4,),))
    return replace(GLOO.rank(rank, seq=0, world=2), collectives=(call,), record=RecordFacts(has_dump=True))


def test_a_dump_may_have_calls_of_a_group_without_its_counters() -> None:
    facts = job(recorded(0), recorded(1), world=2, kind=IncidentKind.RECORDED)
    assert not [line for line in judge(facts, RECORDED_RULES).unanswered if line.startswith("The rule")]


def in_bucket(rank: int, group: str, seq: int, size: int) -> RankFacts:
    """A rank that waits in the all-reduce of one of two buckets."""
    bucket = replace(call_scenes.BUCKET, elements=size, groups=(group,))
    facts = call_scenes.in_backward(GLOO, rank, seq=seq, sizes=((size,),))
    calls = tuple(replace(call, group=group, input_sizes=((size,),)) for call in facts.collectives[-1:])
    return replace(facts, collectives=calls, units=(bucket,))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_left_one_of_two_buckets_out_is_named_whichever_rank_waits_for_it(order: tuple[int, int]) -> None:
    """Rank 2 has made the first bucket's call, and not the one in which one of the others waits."""
    early = in_bucket(order[0], "0", 61, 7)
    late = in_bucket(order[1], "0", 62, 9)
    (first_call,) = early.collectives
    past = GLOO.working(2, user("on_train_batch_end", 90), seq=61, world=3)
    past = replace(past, collectives=(replace(first_call, completed=True),), steps=StepFacts(with_backward=12))
    ranks = sorted((early, late, past), key=lambda facts: facts.rank)
    finding = first(job(*ranks, world=3))
    assert (finding.rule, finding.ranks) == ("unused-parameters", (2,))


@pytest.mark.parametrize("own", [0, 2])
def test_who_is_not_in_a_group_has_left_nothing_out_there(own: int) -> None:
    """Ranks 0 and 1 share one group, 2 and 3 another; rank 1 is past the bucket in which rank 0 waits."""
    halves = {"a": (0, 1), "b": (2, 3)}
    ranks = []
    for rank in range(4):
        name = "a" if rank < 2 else "b"
        called = 61 if rank == own else 60
        group = Group(name=name, ranks=halves[name], last_enqueued=called, last_completed=60)
        facts = in_bucket(rank, name, 61, 7) if rank == own else GLOO.working(rank, user("log", 90), seq=60)
        calls = facts.collectives if rank == own else ()
        ranks.append(replace(facts, groups=(group,), collectives=calls, steps=StepFacts(with_backward=12)))
    finding = first(job(*ranks))
    assert (finding.rule, finding.ranks) == ("unused-parameters", ((1,) if own == 0 else (3,)))


def locked(facts: JobFacts, rank: int) -> JobFacts:
    """The same job, in which a rank waits for a lock as well, and a thread that ended with an exception."""
    lock = ThreadLockFacts(lock="self.lock", thread="writer", taken_at=user("consume", 19), stack=(QUEUE_GET,))
    fed = CaughtException(type="KeyError", message="'label'", stack=(user("feed", 12),), thread="feeder", ago_s=1.0)
    frames = (user("teardown", 99), QUEUE_GET, CONDITION)
    return replace(
        facts,
        ranks=tuple(
            replace(one, thread_lock=lock, caught=(fed,), stack=(*one.stack, *frames)) if one.rank == rank else one
            for one in facts.ranks
        ),
    )


def test_what_to_do_about_a_cause_is_not_replaced_by_advice_about_a_lock() -> None:
    scene = machine_scenes.out_of_gpu_memory(GLOO)
    assert first(scene).rule == "gpu-memory-exhausted"
    finding = first(locked(scene, 2))
    assert (finding.rule, finding.remedy) == ("gpu-memory-exhausted", first(scene).remedy)
    assert "Rank 2 waits there for `self.lock`" in finding.summary


def test_an_error_of_a_rank_is_corrected_whatever_it_waits_for_since() -> None:
    failed = raised(GLOO.working(0, user("step", 80), seq=60), "IndexError", "out of range", user("step", 80))
    scene = job(failed, *(GLOO.waiting(rank, seq=61) for rank in (1, 2, 3)))
    assert first(locked(scene, 0)).remedy == first(scene).remedy


@pytest.mark.parametrize(
    ("channel", "plan"),
    [("rpc_wait_bit_killable", Plan.RESTART), ("kernel_clone", Plan.UNKNOWN), ("", Plan.UNKNOWN)],
)
def test_a_silent_rank_that_may_not_wait_for_storage_is_not_just_started_again(channel: str, plan: Plan) -> None:
    seen = process(2, "disk-sleep", wait_channel=channel)
    (finding,) = blocked_on_disk.findings(machine_scenes.without_answer(GLOO, seen))
    assert finding.plan is plan


def test_a_number_of_errors_that_is_not_available_is_no_fault() -> None:
    gpu = machine_scenes.gpu_of(ecc_errors=-1)
    assert ailment(replace(GLOO.working(0, seq=60), machine=MachineFacts(gpu=gpu))) == ""


def inspected(rank: int, epoch: int, batch: int, *stack: Frame) -> RankFacts:
    facts = GLOO.rank(rank, *stack, seq=0, epoch=epoch, batch=batch, world=2)
    return replace(facts, inspection=InspectionFacts(moved=False))


@pytest.mark.parametrize(("epoch", "is_named"), [(1, True), (-1, False)])
def test_batches_are_compared_within_one_epoch_only(epoch: int, is_named: bool) -> None:
    behind = inspected(0, 1, 3, ENGINE, ALL_REDUCE)
    ahead = inspected(1, epoch, 4, user("training_step", 44), ALL_REDUCE)
    assert bool(skipped_step.findings(job(behind, ahead, world=2))) is is_named
