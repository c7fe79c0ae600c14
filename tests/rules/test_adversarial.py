"""Jobs that no rule was written for: nothing may raise, blame the wrong rank, or claim more than is known."""

from dataclasses import replace

import pytest
from builders import (
    ALL_REDUCE,
    BACKWARD,
    BARRIER,
    ENGINE,
    FLUSH,
    GLOO,
    NCCL,
    NEXT,
    NEXT_DATA,
    TRAINING_STEP,
    Backend,
    job,
    process,
    raised,
    transport_error,
    user,
)
from judged import rules_found
from scenes import rank_zero_evaluates, slow_step

from lightning_ncclsafe.facts import Collective, Group, IncidentKind, Phase, RankFacts
from lightning_ncclsafe.facts.findings import Confidence, Severity
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit import Finding, Rule, Timeline

BACKENDS = pytest.mark.parametrize("net", [GLOO, NCCL], ids=["gloo", "nccl"])


def test_empty_facts() -> None:
    diagnosis = judge(job(world=0))
    assert (diagnosis.findings, diagnosis.unanswered) == ((), ())


def test_everybody_silent() -> None:
    diagnosis = judge(job(world=4))
    assert diagnosis.findings == ()
    assert diagnosis.unanswered == ("No rank answered, so nothing is known about any of them.",)


def test_everybody_silent_and_seen_to_be_stopped() -> None:
    diagnosis = judge(job(world=2, witnessed=(process(0, "stopped"), process(1, "tracing-stop"))))
    assert [finding.rule for finding in diagnosis.findings] == ["stopped-process", "stopped-process"]
    assert "debugger" in diagnosis.findings[1].summary


@BACKENDS
def test_equally_slow_work_is_no_hang(net: Backend) -> None:
    step = user("training_step", 40)
    slow = (net.working(rank, step, seq=60, action=TRAINING_STEP) for rank in range(4))
    assert judge(job(*slow)).findings == ()


def test_one_rank_alone_waits_for_its_loader() -> None:
    alone = GLOO.working(0, NEXT_DATA, seq=0, action=NEXT, world=1)
    assert [finding.rule for finding in judge(job(alone, world=1)).findings] == ["data-stall"]


def test_one_rank_alone_works() -> None:
    alone = GLOO.working(0, user("training_step", 40), seq=0, world=1)
    diagnosis = judge(job(alone, world=1))
    assert (diagnosis.findings, diagnosis.unanswered) == ((), ())


@BACKENDS
def test_without_a_recorder_the_stacks_decide(net: Backend) -> None:
    scene = rank_zero_evaluates(GLOO)
    blind = replace(scene, ranks=tuple(replace(facts, groups=(), collectives=()) for facts in scene.ranks))
    diagnosis = judge(blind)
    assert (diagnosis.findings[0].rule, diagnosis.findings[0].ranks) == ("rank-zero-only-work", (0,))
    assert any("no Flight Recorder data" in line for line in diagnosis.unanswered)


def test_without_a_recorder_everybody_waiting_still_gets_a_finding() -> None:
    waiting = (replace(GLOO.in_barrier(rank, "x", seq=5), groups=(), collectives=()) for rank in range(4))
    (finding,) = judge(job(*waiting)).findings
    assert (finding.rule, finding.confidence, finding.ranks) == ("rank-behind", Confidence.POSSIBLE, ())


def test_without_stacks_the_recorder_decides() -> None:
    scene = slow_step(GLOO)
    blind = replace(scene, ranks=tuple(replace(facts, stack=()) for facts in scene.ranks))
    assert judge(blind).findings[0].ranks == (2,)


def test_ranks_that_ran_ahead_differently_are_not_behind() -> None:
    """NCCL: ranks 1 and 3 wait in 61 as well, though they have called fewer collectives than rank 0."""
    ahead = {0: 5, 1: 1, 3: 2}
    waiting = {rank: NCCL.rank(rank, ENGINE, seq=60 + n, outstanding=n, action=BACKWARD) for rank, n in ahead.items()}
    culprit = NCCL.working(2, user("training_step", 40), seq=60, action=TRAINING_STEP)
    first = judge(job(waiting[0], waiting[1], culprit, waiting[3])).findings[0]
    assert (first.rule, first.ranks) == ("rank-behind", (2,))


def test_a_root_that_has_left_its_broadcast_does_not_hide_the_straggler() -> None:
    """On both back ends the root of a small broadcast goes on to the next collective before the others have come."""
    root = GLOO.rank(0, ENGINE, seq=62, outstanding=1, action=BACKWARD)
    culprit = GLOO.working(2, NEXT_DATA, seq=60, action=NEXT)
    first = judge(job(root, GLOO.in_sigterm_broadcast(1, seq=61), culprit, GLOO.in_sigterm_broadcast(3, seq=61)))
    assert (first.findings[0].rule, first.findings[0].ranks) == ("data-stall", (2,))


def test_nccl_work_with_a_collective_in_flight_is_not_blamed() -> None:
    """Ranks 0, 1 and 3 are in user code while 61 is outstanding on their devices: they wait without knowing it."""
    busy = {rank: NCCL.rank(rank, user("training_step", 40), seq=61, outstanding=1) for rank in (0, 1, 3)}
    culprit = NCCL.working(2, user("slow", 90), seq=60, action=TRAINING_STEP)
    first = judge(job(busy[0], busy[1], culprit, busy[3])).findings[0]
    assert first.ranks == (2,)


def test_waits_in_a_circle_are_crossed_groups() -> None:
    def member(rank: int, waits_in: str, last_elsewhere: int) -> tuple[Group, ...]:
        other = "tp" if waits_in == "dp" else "dp"
        counters = {waits_in: (8, 7), other: (last_elsewhere, last_elsewhere)}
        return tuple(
            Group(name=name, ranks=(0, 1), last_enqueued=called, last_completed=done)
            for name, (called, done) in sorted(counters.items())
        )

    def rank(number: int, group: str) -> object:
        call = Collective(group=group, seq=8, op="all_reduce", backend="gloo", input_sizes=((4,),))
        base = GLOO.rank(number, ALL_REDUCE, seq=0, world=2)
        return replace(base, groups=member(number, group, 7), collectives=(call,))

    first = judge(job(rank(0, "dp"), rank(1, "tp"), world=2)).findings[0]  # type: ignore[arg-type]
    assert (first.rule, first.ranks) == ("crossed-groups", (0, 1))


def test_uneven_sizes_are_no_divergence_where_they_are_allowed() -> None:
    waiting = (
        GLOO.rank(rank, ALL_REDUCE, seq=9, outstanding=1, op="all_to_all", sizes=((rank + 1,),)) for rank in range(4)
    )
    assert judge(job(*waiting)).findings[0].rule == "all-joined"


def test_another_function_for_the_same_collective_is_a_divergence() -> None:
    here, there = user("validation_step", 50), user("log_everything", 80)
    ranks = (GLOO.rank(n, there if n == 2 else here, BARRIER, seq=9, outstanding=1, op="barrier") for n in range(4))
    first = judge(job(*ranks)).findings[0]
    assert (first.rule, first.ranks) == ("diverged-collectives", (2,))


def test_uneven_validation_that_still_meets_is_not_uneven_batches() -> None:
    """Ranks may have different numbers of validation batches, as long as all come to the same collective."""
    meet = {"op": "all_reduce", "sizes": ((1,),), "phase": Phase.VALIDATE}
    ranks = (GLOO.rank(n, ALL_REDUCE, seq=61, outstanding=1, batch=20 - n, last=n > 0, **meet) for n in range(4))
    assert [finding.rule for finding in judge(job(*ranks)).findings] == ["all-joined"]


def test_ranks_that_raise_alike_share_a_finding() -> None:
    line = user("training_step", 42)
    failed = (raised(GLOO.working(n, seq=60), "ValueError", f"label {n}", line) for n in range(3))
    (finding,) = [f for f in judge(job(*failed, GLOO.waiting(3, seq=61))).findings if f.rule == "failed-rank"]
    assert finding.ranks == (0, 1, 2)


def test_only_consequences_and_nobody_missing() -> None:
    (finding,) = judge(job(*(transport_error(GLOO.waiting(n, seq=61)) for n in range(4)))).findings
    assert (finding.rule, finding.confidence) == ("network-cut", Confidence.LIKELY)


def test_a_timeout_makes_it_an_error() -> None:
    scene = rank_zero_evaluates(GLOO)
    late = replace(scene, incident=replace(scene.incident, kind=IncidentKind.TIMEOUT))
    assert judge(scene).findings[0].severity is Severity.WARNING
    assert judge(late).findings[0].severity is Severity.ERROR


def test_a_rule_that_fails_hides_nothing() -> None:
    def fails(_: Timeline) -> list[Finding]:
        raise ZeroDivisionError("oops")

    broken = Rule("broken-rule", fails, Timeline)
    diagnosis = judge(slow_step(GLOO), (broken, *HANG_RULES))
    assert diagnosis.findings[0].rule == "rank-behind"
    assert "The rule broken-rule failed (ZeroDivisionError: oops)." in diagnosis.unanswered


def test_a_slow_logger_below_another_straggler_is_not_the_first_answer() -> None:
    """Nobody waits for a rank that flushes while it has already joined what the others wait in."""
    flushing = NCCL.rank(0, FLUSH, seq=61, outstanding=1)
    culprit = NCCL.working(2, user("training_step", 40), seq=60, action=TRAINING_STEP)
    first = judge(job(flushing, NCCL.waiting(1, seq=61), culprit, NCCL.waiting(3, seq=61))).findings[0]
    assert first.ranks == (2,)


@BACKENDS
def test_one_of_a_thousand_ranks_is_named(net: Backend) -> None:
    others = [net.in_sigterm_broadcast(rank, seq=500, epoch=1, world=1024) for rank in range(1, 1024)]
    long_ring = net.recorded(499)[:1] * 290
    others = [replace(facts, collectives=(*long_ring, *facts.collectives)) for facts in others]
    culprit = net.working(0, user("evaluate", 73, condition="if rank == 0:"), seq=499, world=1024)
    first = judge(job(culprit, *others, world=1024)).findings[0]
    assert (first.rule, first.ranks) == ("rank-zero-only-work", (0,))


def test_a_rank_that_works_ahead_of_the_others_is_not_out_of_data() -> None:
    """Rank 1 is in validation already and busy there: that it is seen at work says more than where it stands."""
    step = user("validation_step", 50)
    busy = GLOO.working(1, step, seq=60, phase=Phase.VALIDATE, action="[Strategy]SafeDDP.validation_step", batch=3)
    ranks = (busy if rank == 1 else GLOO.waiting(rank, seq=61, batch=20) for rank in range(4))
    assert rules_found(job(*ranks)) == ["rank-behind"]


def test_ranks_that_all_are_in_their_last_batch_have_equally_many() -> None:
    """Rank 1 skipped the last batch's gradients: a divergence at the end of the data is still a divergence."""
    culprit = GLOO.in_barrier(1, "epoch_end", seq=61, batch=19, last=True)
    ranks = (culprit if rank == 1 else GLOO.waiting(rank, seq=61, batch=19, last=True) for rank in range(4))
    first = judge(job(*ranks)).findings[0]
    assert (first.rule, first.ranks) == ("diverged-collectives", (1,))


def test_silence_alone_is_not_death() -> None:
    assert rules_found(job(*(GLOO.waiting(rank, seq=61) for rank in (0, 2, 3)))) == ["frozen-rank"]


def test_what_is_certain_comes_before_what_is_possible() -> None:
    stalled = NCCL.working(2, NEXT_DATA, seq=60, action=NEXT)
    ranks = (NCCL.waiting(0, seq=61), NCCL.waiting(1, seq=61), stalled)
    assert rules_found(job(*ranks)) == ["data-stall", "frozen-rank"]


def test_a_loader_below_a_condition_is_not_the_trainings() -> None:
    stack = (user("on_train_epoch_end", 70, condition="if rank == 0:  (line 69)"), NEXT_DATA)
    culprit = GLOO.working(0, *stack, seq=60)
    found = rules_found(job(culprit, *(GLOO.waiting(rank, seq=61) for rank in (1, 2, 3))))
    assert found == ["rank-zero-only-work"]


def in_groups(facts: RankFacts, *groups: Group, calls: tuple[Collective, ...] = ()) -> RankFacts:
    return replace(facts, groups=groups, collectives=calls)


def test_a_rank_for_which_nobody_waits_is_not_blamed() -> None:
    """Ranks 0 and 1 form a group in which 1 is behind; rank 2 is in its loader and no member."""
    pair = Group(name="pair", ranks=(0, 1), last_enqueued=5, last_completed=4)
    call = Collective(group="pair", seq=5, op="all_reduce", backend="gloo", input_sizes=((4,),))
    waits = in_groups(GLOO.rank(0, ALL_REDUCE, seq=0), pair, calls=(call,))
    culprit = in_groups(GLOO.rank(1, user("slow", 90), seq=0), replace(pair, last_enqueued=4))
    apart = GLOO.rank(2, NEXT_DATA, seq=0, action=NEXT)
    first, *others = judge(job(waits, culprit, apart, world=3)).findings
    assert (first.rule, first.ranks, others) == ("rank-behind", (1,), [])


def test_a_group_queued_behind_a_stuck_one_is_not_a_broken_link() -> None:
    """NCCL: ranks 0 and 1 have both called in their own group, on a device that still waits for rank 2 elsewhere."""
    pair = Group(name="pair", ranks=(0, 1), last_enqueued=5, last_completed=4)
    call = Collective(group="pair", seq=5, op="all_reduce", backend="nccl", input_sizes=((4,),))

    def queued(rank: int) -> RankFacts:
        facts = NCCL.waiting(rank, seq=61, world=3)
        return in_groups(facts, *facts.groups, pair, calls=(*facts.collectives, call))

    culprit = NCCL.working(2, user("slow", 90), seq=60, action=TRAINING_STEP, world=3)
    assert rules_found(job(queued(0), queued(1), culprit, world=3)) == ["rank-behind"]


def test_a_collective_in_flight_under_slow_work_is_no_broken_link() -> None:
    """Gloo: everyone works while an asynchronous collective is in flight; nobody waits for it."""
    slow = (GLOO.rank(rank, user("training_step", 40), seq=61, outstanding=1) for rank in range(4))
    assert rules_found(job(*slow)) == []


def test_a_collective_that_the_last_rank_has_only_just_joined_is_no_broken_link() -> None:
    now_ns = 50_000_000_000
    early, late = (GLOO.in_sigterm_broadcast(rank, seq=8, world=2) for rank in (0, 1))
    joined_ago_ns = {0: 20_000_000_000, 1: 100_000_000}
    ranks = []
    for facts in (early, late):
        entry = replace(facts.collectives[-1], created_ns=now_ns - joined_ago_ns[facts.rank])
        ranks.append(replace(facts, taken_ns=now_ns, collectives=(entry,)))
    assert judge(job(*ranks, world=2)).findings[0].rule == "rank-behind"
    long_ago = replace(ranks[1].collectives[0], created_ns=now_ns - 19_000_000_000)
    ranks[1] = replace(ranks[1], collectives=(long_ago,))
    assert judge(job(*ranks, world=2)).findings[0].rule == "all-joined"
