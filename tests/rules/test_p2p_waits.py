"""Sends and receives: circles, what a pending one on NCCL shows, and which side is odd."""

from dataclasses import replace
from typing import Any

import pytest
from builders import GLOO, NCCL, RUN, SITE, TRAINING_STEP, USER_FILE, Backend, job, raised, user
from call_scenes import peers_counted_within_a_pipeline, shape_that_is_not_sent
from judged import first, found

from lightning_ncclsafe.facts import (
    Action,
    Branch,
    Collective,
    Decides,
    Frame,
    Group,
    IncidentKind,
    JobFacts,
    NotRecorded,
    RankFacts,
    StepFacts,
    UnrecordedGroup,
)
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

GATHER = Frame(file=f"{SITE}/torch/distributed/distributed_c10d.py", line=9, function="broadcast_object_list")
EXABYTE = "CUDA out of memory. Tried to allocate more than 1EB memory."


def pending(facts: RankFacts, *ops: str, in_batch: bool = False) -> RankFacts:
    """The same rank with these sends and receives, as one batch or one after the other."""
    calls = (
        Collective(group="0", seq=3 if in_batch else 3 + index, op=op, backend="nccl", is_p2p=True)
        for index, op in enumerate(ops)
    )
    return replace(facts, collectives=(*facts.collectives, *calls))


def reading(rank: int, *ops: str, world: int = 2, code: str = "loss.item()", in_batch: bool = False) -> RankFacts:
    """A rank at a line that reads from its device."""
    line = user("training_step", 40, code=code)
    return pending(NCCL.working(rank, line, seq=60, world=world, action=TRAINING_STEP), *ops, in_batch=in_batch)


def ring(world: int, *, in_batch: bool) -> JobFacts:
    """Each rank sends to the next one, and receives from the one before."""
    ops = {rank: (f"send {rank}->{(rank + 1) % world}", f"recv {rank}<-{(rank - 1) % world}") for rank in range(world)}
    return job(*(reading(rank, *ops[rank], world=world, in_batch=in_batch) for rank in ops), world=world)


@pytest.mark.parametrize("facts", [ring(2, in_batch=True), ring(3, in_batch=True), ring(3, in_batch=False)])
def test_what_both_sides_have_called_is_no_circle(facts: JobFacts) -> None:
    assert found(facts).keys().isdisjoint({"crossed-groups", "unmatched-p2p"})


def test_two_ranks_that_both_send_first_wait_for_each_other() -> None:
    finding = first(ring(2, in_batch=False))
    assert (finding.rule, finding.ranks, finding.confidence) == ("unmatched-p2p", (0, 1), Confidence.LIKELY)


def blocked_in(call: Frame, rank: int, peer: int, world: int = 3) -> RankFacts:
    """A rank in a send or receive on gloo."""
    facts = GLOO.working(rank, user("pass_on", 73), call, seq=60, action=TRAINING_STEP, world=world)
    return replace(facts, steps=StepFacts(peer=peer))


@pytest.mark.parametrize(("call", "step"), [("send", 1), ("recv", -1)])
def test_a_ring_in_which_all_do_the_same_first_crosses_no_groups(call: str, step: int) -> None:
    frame = replace(GATHER, function=call)
    scene = job(*(blocked_in(frame, rank, (rank + step) % 3) for rank in range(3)), world=3)
    for incident in (scene.incident, replace(scene.incident, kind=IncidentKind.RECORDED)):
        rules = RECORDED_RULES if incident.kind is IncidentKind.RECORDED else HANG_RULES
        (finding,) = judge(replace(scene, incident=incident), rules).findings
        assert (finding.rule, finding.ranks, finding.confidence) == ("unmatched-p2p", (0, 1, 2), Confidence.CERTAIN)
        assert finding.location == f"{USER_FILE}:73 in pass_on"
        assert finding.summary.startswith(f"Rank 0 waits in {call} for rank {step % 3}, rank ")
        assert finding.summary.endswith(": they wait for each other in a circle.")
        assert finding.remedy.startswith("Let one side send first and the other receive first")


def test_sends_in_several_groups_may_be_a_matter_of_their_order() -> None:
    ranks = (reading(0, "send 0->1"), reading(1, "send 1->0"))
    moved = replace(
        ranks[1], collectives=tuple(replace(c, group="1" if c.is_p2p else "0") for c in ranks[1].collectives)
    )
    moved = replace(moved, groups=(*moved.groups, Group(name="1", ranks=(0, 1))))
    assert "crossed-groups" in found(job(ranks[0], moved, world=2))


def test_other_causes_of_what_a_circle_keeps_waiting_are_left_out() -> None:
    """Rank 2 waits in a collective for the ranks that wait for each other."""
    send = replace(GATHER, function="send")
    others = (blocked_in(send, rank, 1 - rank) for rank in (0, 1))
    assert [*found(job(*others, GLOO.waiting(2, seq=61, world=3), world=3))] == ["unmatched-p2p"]


def test_a_send_and_its_receive_are_no_circle() -> None:
    told = first(shape_that_is_not_sent(GLOO))
    assert (told.rule, told.ranks) == ("unmatched-p2p", (0, 1))
    assert "what is received is not what is sent" in told.summary


def test_of_two_ranks_either_may_be_odd() -> None:
    scene = peers_counted_within_a_pipeline(GLOO)
    waits = replace(scene.ranks[2], rank=1, steps=StepFacts(peer=0))
    of_two = tuple(
        replace(one, groups=tuple(replace(group, ranks=(0, 1)) for group in one.groups))
        for one in (scene.ranks[0], waits)
    )
    assert found_ranks(job(*of_two, world=2)) == (0, 1)


def changed(scene: JobFacts, rank: int, **more: Any) -> JobFacts:
    """The same job with other facts of a rank."""
    return replace(scene, ranks=tuple(replace(one, **more) if one.rank == rank else one for one in scene.ranks))


def test_ranks_that_have_not_passed_the_line_together_may_be_the_odd_ones() -> None:
    """Then all four are named, as the ones that go on may have left out a call."""
    scene = peers_counted_within_a_pipeline(GLOO)
    told = first(scene)
    assert (told.ranks, told.confidence) == ((2, 3), Confidence.LIKELY)
    assert "ranks 0-1 have made the call of that line in this batch, and completed it without ranks 2-3" in told.summary
    progress, stack = scene.ranks[0].progress, scene.ranks[2].stack
    line = next(frame for frame in stack if frame.function == "hand_on")
    under = Branch(line=74, test="if rows:  (line 74)", on=Decides.VALUE, until=75)
    library = replace(GATHER, file=f"{SITE}/other/library.py", function="on_some_ranks")
    by_hand = user("training_step", 42)
    at = stack.index(line)
    doubts = [
        changed(scene, 0, progress=replace(progress, batch_idx=progress.batch_idx + 1)),
        changed(
            scene,
            0,
            progress=replace(progress, actions=(*progress.actions[:-1], Action(name=TRAINING_STEP, for_s=1.0))),
        ),
        changed(scene, 0, stack=(*scene.ranks[0].stack[:-1], by_hand, scene.ranks[0].stack[-1])),
        changed(scene, 2, stack=tuple(replace(one, branches=(under,)) if one is line else one for one in stack)),
        changed(scene, 2, stack=tuple(replace(one, code="") if one is line else one for one in stack)),
        changed(scene, 2, stack=(*stack[:at], library, *stack[at:])),
    ]
    for doubt in doubts:
        assert found_ranks(doubt) == (0, 1, 2, 3)
    common = replace(under, on=Decides.COMMON)
    alike = changed(scene, 2, stack=tuple(replace(one, branches=(common,)) if one is line else one for one in stack))
    assert found_ranks(alike) == (2, 3)


def found_ranks(facts: JobFacts) -> tuple[int, ...]:
    """The ranks that are named for what they send and receive."""
    return next(finding.ranks for finding in judge(facts).findings if finding.rule == "unmatched-p2p")


def test_on_nccl_the_recorder_has_what_others_have_completed() -> None:
    def at_line(facts: RankFacts, op: str, *, completed: bool, before: int, site: str = "line") -> RankFacts:
        call = Collective(group="0", seq=3, op=op, backend="nccl", is_p2p=True, completed=completed, site=site)
        at = next(index for index, one in enumerate(facts.collectives) if one.seq == before) + 1
        return replace(facts, collectives=(*facts.collectives[:at], call, *facts.collectives[at:]))

    def four(*, before: int = 60, op: str = "recv 1<-0", site: str = "line", completed: bool = True) -> JobFacts:
        line = user("training_step", 40, code="loss.item()")
        waits = [NCCL.working(rank, line, seq=60, action=TRAINING_STEP) for rank in (2, 3)]
        return job(
            at_line(NCCL.waiting(0, seq=61), "send 0->1", completed=True, before=before),
            at_line(NCCL.waiting(1, seq=61), op, completed=completed, before=before, site=site),
            at_line(waits[0], "send 2->1", completed=False, before=60),
            at_line(waits[1], "recv 3<-0", completed=False, before=60),
        )

    assert found_ranks(four()) == (2, 3)
    assert found_ranks(four(before=59)) == (0, 1, 2, 3), "those are of the step before"
    assert found_ranks(four(op="recv 1<-2")) == (0, 1, 2, 3), "not with one another"
    assert found_ranks(four(site="another")) == (0, 1, 2, 3), "of another line"
    assert found_ranks(four(completed=False)) == (0, 1, 2, 3), "still open"


def test_that_a_rank_waits_for_what_is_pending_is_never_certain() -> None:
    """Rank 0 may count its samples there: this line need not read from a device."""
    facts = job(reading(0, "send 0->1", code="count = int(len(rows))"), reading(1, "send 1->0"), world=2)
    assert Confidence.CERTAIN not in found(facts).values()


def test_a_peer_in_a_collective_may_have_sent_to_others() -> None:
    peers = (pending(NCCL.waiting(1, seq=61, world=3), "send 1->2"), NCCL.waiting(2, seq=61, world=3))
    finding = first(job(reading(0, "recv 0<-1", world=3), *peers, world=3))
    assert (finding.rule, finding.ranks) == ("unmatched-p2p", (0,))


def test_a_peer_that_has_sent_and_gone_on_to_a_collective_owes_nothing() -> None:
    peer = pending(NCCL.waiting(1, seq=61, world=2), "send 1->0")
    assert "unmatched-p2p" not in found(job(reading(0, "recv 0<-1"), peer, world=2))


@pytest.mark.parametrize("net", [GLOO, NCCL], ids=["gloo", "nccl"])
def test_a_size_that_nobody_has_sent_is_not_said_to_be_of_a_back_end_that_is_not_there(net: Backend) -> None:
    facts = raised(net.working(0, seq=60), "RuntimeError", EXABYTE, RUN, user("gather", 33), GATHER)
    finding = first(job(facts, *(net.waiting(rank, seq=61) for rank in (1, 2, 3))))
    assert finding.rule == "diverged-collectives" and "NCCL" not in finding.summary


def test_a_rank_alone_has_not_diverged_from_others() -> None:
    facts = raised(NCCL.working(0, seq=60, world=1), "RuntimeError", EXABYTE, RUN, user("gather", 33), GATHER)
    assert first(job(facts, world=1)).rule == "failed-rank"


def exchanging(*kinds: str, begun_at: str = f"{USER_FILE}:70 in hand_over") -> tuple[RankFacts, ...]:
    """Of three ranks, those that wait for such operations in groups that gloo has no entry of; the others are past."""
    wait = user("hand_over", 75, code="work.wait()")
    lost = UnrecordedGroup(name="1", why=NotRecorded.LOST, backend="gloo", calls=1)
    here = [
        replace(
            GLOO.working(rank, wait, seq=87, action=TRAINING_STEP, world=3),
            unrecorded=(lost,),
            steps=StepFacts(awaited=(kind,) if kind else (), begun_at=begun_at if kind else ""),
        )
        for rank, kind in enumerate(kinds)
    ]
    return (*here, *(GLOO.waiting(rank, seq=88, world=3) for rank in range(len(kinds), 3)))


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("send",), "for a send (begun at train.py:70 in hand_over) that never completes"),
        (("recv", "recv"), "for a receive (begun at train.py:70 in hand_over) that never completes"),
        (("send", "recv"), "for sends or receives (begun at train.py:70 in hand_over) that never complete"),
    ],
)
def test_operations_that_are_known_to_be_sends_or_receives_are_told_where_they_began(
    kinds: tuple[str, ...], words: str
) -> None:
    finding = first(job(*exchanging(*kinds), world=3))
    assert (finding.rule, finding.ranks) == ("unmatched-p2p", tuple(range(len(kinds))))
    assert words in finding.summary and finding.location == f"{USER_FILE}:70 in hand_over"
    assert not [one for one in finding.evidence if one.source == "flight recorder"], "it has no entry of that group"


def test_what_began_at_different_lines_is_told_where_ranks_wait() -> None:
    one, other, past = exchanging("send", "recv")
    other = replace(other, steps=replace(other.steps, begun_at=f"{USER_FILE}:71 in hand_over"))
    finding = first(job(one, other, past, world=3))
    assert finding.location == f"{USER_FILE}:75 in hand_over" and "begun at" not in finding.summary


def test_a_wait_in_a_group_without_entries_may_be_for_a_collective() -> None:
    assert "unmatched-p2p" not in found(job(*exchanging("", ""), world=3))
