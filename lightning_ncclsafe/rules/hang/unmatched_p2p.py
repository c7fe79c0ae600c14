"""The cause unmatched-p2p: ranks wait for sends and receives that do not match each other."""

from collections import defaultdict
from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Kind,
    Plan,
    Timeline,
    batch_words,
    capitalised,
    clause,
    finding,
    hang_rule,
    has_other_side,
    joined,
    location_of,
    peer_of,
    place_words,
    ranks_words,
    send_recv_pairs,
    sole_receiver,
    stack_evidence,
    verb,
    wait_words,
)


@hang_rule(
    after="crossed-groups",
    remedy=(
        "Compare the calls on both sides: peer, tag, shape, number and order; it is enough that one side counts "
        "microbatches from 0 and the other from 1. Or pair each send with its receive in dist.batch_isend_irecv."
    ),
    plan=Plan.STOP,
)
def unmatched_p2p(view: Timeline) -> Iterator[Finding]:
    """Ranks wait for sends and receives that match no other rank's, and nobody does anything else.

    Symptom:
        Ranks are in Work.wait() with no collective outstanding; gloo's recorder has no entry for it. Or a rank is in
        send() or recv(), and its peer waits in a collective, or in a send or receive of something else.

    Cause:
        Sends and receives with different tags, peers or numbers than those of the other side; stages of a pipeline that
        disagree about the number or the order of their exchanges.

    Remedy:
        Compare peer, tag, shape and order on both sides.

    Cannot see:
        Which send or receive has no other side, because gloo records none; which side is wrong; which rank has not sent
        to a rank that receives from any source. A wait() of another library that is written in C looks the same.
    """
    sides = tuple(rank for rank in view.waiting if _waits_for_peer(view, rank))
    # A rank that still works, or one that is gone, may be the other side.
    if set(view.waiting) != set(view.facts) or view.silent or view.raised:
        return
    if len(sides) > 1:
        yield _finding(view, sides)
    elif pairs := send_recv_pairs(view):
        yield _different_messages(view, pairs)
    elif peers := _peers_in_collectives(view):
        yield _peers_moved_on(view, peers)
    elif (rank := sole_receiver(view)) is not None:
        yield _no_sender(view, rank)


def _waits_for_peer(view: Timeline, rank: int) -> bool:
    """Whether a rank is in a wait() of C++ code although all collectives are recorded and none is outstanding."""
    facts, doing = view.facts[rank], view.activities[rank]
    is_wait = doing.kind is Kind.COLLECTIVE and doing.call == "wait" and doing.collective is None
    return is_wait and not facts.unrecorded and facts.exception is None


def _peers_in_collectives(view: Timeline) -> dict[int, int]:
    """Ranks that send or receive, each with its peer, if the peer waits in a collective and not in the other side."""
    peers = {}
    for rank in view.waiting:
        doing, peer = view.activities[rank], peer_of(view, rank)
        exchanges = doing.kind is Kind.COLLECTIVE and doing.collective is None
        if exchanges and peer in view.facts and _is_in_collective(view, peer) and not has_other_side(view, rank):
            peers[rank] = peer
    return peers


def _is_in_collective(view: Timeline, rank: int) -> bool:
    doing = view.activities[rank]
    return doing.kind is Kind.COLLECTIVE and doing.collective is not None and view.facts[rank].steps.peer < 0


def _different_messages(view: Timeline, pairs: dict[int, int]) -> Finding:
    receiving = [rank for rank in pairs if view.activities[rank].call == "recv"]
    parts = [
        f"rank {rank} waits in recv for rank {pairs[rank]}, which waits in send for rank {rank} "
        f"{place_words(view.activities[pairs[rank]].frame)}"
        for rank in receiving
    ]
    batch = batch_words(view.facts[receiving[0]].progress)
    return finding(
        view,
        tuple(sorted(pairs)),
        f"{', '.join(parts)}, {batch}: what is received is not what is sent, by its tag, its group or its shape.",
        location=location_of(view.activities[receiving[0]].frame),
        evidence=_evidence(view, tuple(sorted(pairs))),
    )


def _peers_moved_on(view: Timeline, peers: dict[int, int]) -> Finding:
    parts = [
        f"rank {rank} waits in {wait_words(view, rank)} for rank {peer}, which waits in {wait_words(view, peer)}"
        for rank, peer in peers.items()
    ]
    batch = batch_words(view.facts[next(iter(peers))].progress)
    frames = {location_of(view.activities[rank].frame) for rank in peers}
    are_few = 2 * len(peers) < len(view.waiting)
    return finding(
        view,
        tuple(sorted(peers if are_few else {*peers, *peers.values()})),
        f"{', '.join(parts)}, {batch}: one side sends or receives more often than the other.",
        location=frames.pop() if len(frames) == 1 else "",
        evidence=tuple(stack_evidence(view, (*peers,))),
    )


def _no_sender(view: Timeline, rank: int) -> Finding:
    frame = view.activities[rank].frame
    others = tuple(other for other in view.waiting if other != rank)
    text = (
        f"rank {rank} waits in recv {place_words(frame)}, from any rank or an unknown one, and "
        f"{clause(others, 'has|have')} continued to collectives: one side sends or receives more often than the other."
    )
    return finding(
        view,
        tuple(view.facts),
        text,
        confidence=Confidence.POSSIBLE,
        location=location_of(frame),
        evidence=tuple(stack_evidence(view, view.facts)),
    )


def _finding(view: Timeline, sides: tuple[int, ...]) -> Finding:
    places: dict[str, list[int]] = defaultdict(list)
    for rank in sides:
        places[place_words(view.activities[rank].frame)].append(rank)
    parts = [f"{clause(ranks, 'waits|wait')} {place}" for place, ranks in places.items()]
    batch = batch_words(view.facts[sides[0]].progress)
    first = f"{', '.join(parts)}, {batch}, for sends or receives that never complete: none matches the other side."
    frames = {location_of(view.activities[rank].frame) for rank in sides}
    return finding(
        view,
        sides,
        joined((first, _others(view, sides))),
        location=frames.pop() if len(frames) == 1 else "",
        evidence=_evidence(view, sides),
    )


def _others(view: Timeline, sides: tuple[int, ...]) -> str:
    others = view.waiting_besides(sides)
    return f"{capitalised(ranks_words(others))} {verb(others, 'waits', 'wait')} for them." if others else ""


def _evidence(view: Timeline, sides: tuple[int, ...]) -> Iterator[Evidence]:
    yield from stack_evidence(view, sides)
    text = f"{capitalised(ranks_words(sides))}: no collective called there is outstanding."
    yield Evidence(source="flight recorder", text=text)
