"""Sends and receives on NCCL, which return at once: what a pending one shows, and what it does not."""

from dataclasses import replace

import pytest
from builders import GLOO, NCCL, RUN, SITE, TRAINING_STEP, Backend, job, raised, user
from judged import first, found

from lightning_ncclsafe.facts import Collective, Frame, JobFacts, RankFacts
from lightning_ncclsafe.facts.findings import Confidence

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
    assert "crossed-groups" not in found(facts)


def test_two_ranks_that_both_send_first_wait_for_each_other() -> None:
    assert found(ring(2, in_batch=False))["crossed-groups"] is Confidence.LIKELY


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
