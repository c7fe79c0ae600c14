"""The cause unmatched-p2p: ranks wait for sends and receives that do not match each other."""

import itertools
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.code.libraries import MODULE_CALLS
from lightning_ncclsafe.facts import Collective, Decides, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Kind,
    Plan,
    Timeline,
    batch_words,
    call_location,
    capitalised,
    circle_of_p2p,
    clause,
    condition_evidence,
    finding,
    hang_rule,
    has_other_side,
    hook_words,
    in_own_call,
    inside_trainer,
    is_of_fsdp,
    joined,
    location_of,
    other_end,
    outstanding_p2p,
    peer_of,
    peer_waited_for,
    place_words,
    ranks_by,
    ranks_words,
    send_recv_pairs,
    short_place,
    sole_receiver,
    stack_evidence,
    wait_words,
    waits_in_one_group,
    where_evidence,
)

_REMEDY_CIRCLE = (
    "Let one side send first and the other receive first (for a ring: by the parity of the rank), or start all of them "
    "at once with dist.batch_isend_irecv, and wait afterwards."
)
_HOPS = 4
_STEP = "training_step"


@hang_rule(
    after="crossed-groups",
    remedy=(
        "Compare the calls on both sides: peer, tag, shape, number and order; it is enough that one side counts "
        "microbatches from 0 and the other from 1. Or pair each send with its receive in dist.batch_isend_irecv."
    ),
    plan=Plan.STOP,
)
def unmatched_p2p(view: Timeline) -> Iterator[Finding]:
    """Ranks wait for sends and receives that match no other rank's, or for each other's in a circle.

    Symptom:
        Ranks are in Work.wait() with no collective outstanding; gloo's recorder has no entry for it. Or a rank is in
        send() or recv(), and its peer waits in a collective, or in a send or receive of something else. Or all ranks of
        a ring are in send(), or all in recv().

    Cause:
        Sends and receives with different tags, peers or numbers than those of the other side; stages of a pipeline that
        disagree about the number or the order of their exchanges. Ranks that all send before they receive, or all
        receive before they send: each waits for the next one, in a circle.

    Remedy:
        Compare peer, tag, shape and order on both sides. In a ring, let every other rank receive first, or use
        dist.batch_isend_irecv.

    Cannot see:
        Which send or receive has no other side, because gloo records none, nor which ranks an isend or irecv connects;
        which side is wrong, unless the others are known to have completed their calls of the same line in this batch;
        which rank has not sent to a rank that receives from any source. A wait() of another library that is written in
        C looks the same.
    """
    if circle := circle_of_p2p(view):
        yield in_circle(view, circle)
        return
    sides = tuple(rank for rank in view.waiting if _waits_for_peer(view, rank))
    # A rank that still works, or one that is gone, may be the other side.
    if not view.all_wait:
        return
    if len(sides) > 1 or any(view.facts[rank].steps.awaited for rank in sides):
        yield _finding(view, sides)
    elif pairs := send_recv_pairs(view):
        yield _different_messages(view, pairs)
    elif peers := _peers_in_collectives(view):
        yield _peers_moved_on(view, peers)
    elif (rank := sole_receiver(view)) is not None:
        yield _no_sender(view, rank)


def in_circle(view: Timeline, circle: dict[int, int]) -> Finding:
    """The finding about ranks that wait in sends and receives for each other, see :func:`circle_of_p2p`."""
    ranks = tuple(sorted(rank for rank in view.waiting if peer_waited_for(view, rank) in view.facts))
    hops = [f"rank {rank} waits in {wait_words(view, rank)} for rank {peer}" for rank, peer in circle.items()]
    # NCCL's sends and receives return at once: that a rank waits for one is concluded from its line.
    is_seen = all(view.facts[rank].steps.peer >= 0 for rank in circle)
    is_certain = is_seen and all(waits_in_one_group(view.facts[rank]) for rank in circle)
    listed = list(circle.items())[:LISTED]
    seen = [
        Evidence(source="stack", rank=rank, text=f"Is in {wait_words(view, rank)} with rank {peer}.")
        for rank, peer in listed
    ]
    return finding(
        view,
        ranks,
        f"{', '.join(hops[:_HOPS])}: they wait for each other in a circle.",
        confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
        # That FSDP gathers a model where the user's code runs it is usual.
        location=call_location(view, sorted(ranks, key=lambda rank: is_of_fsdp(view.facts[rank]))),
        evidence=(*seen, *condition_evidence(view, circle), *where_evidence(view, circle)),
        remedy=_REMEDY_CIRCLE,
    )


def _waits_for_peer(view: Timeline, rank: int) -> bool:
    """Whether a rank waits for a send or receive, or is in a wait() of C++ code while no collective is outstanding."""
    facts, doing = view.facts[rank], view.activities[rank]
    is_wait = doing.kind is Kind.COLLECTIVE and doing.call == "wait" and doing.collective is None
    return is_wait and facts.exception is None and bool(facts.steps.awaited or not facts.unrecorded)


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
    others = view.waiting_besides(tuple(peers))
    are_odd = _have_exchanged(view, peers, others)
    if are_odd and not are_few:
        who = clause(others, "has|have")
        why = f"{who} made the call of that line in this batch, and completed it without {ranks_words(tuple(peers))}"
    else:
        why = "one side sends or receives more often than the other"
    return finding(
        view,
        tuple(sorted(peers if are_few or are_odd else {*peers, *peers.values()})),
        f"{', '.join(parts)}, {batch}: {why}.",
        location=frames.pop() if len(frames) == 1 else "",
        evidence=tuple(stack_evidence(view, (*peers,))),
    )


def _have_exchanged(view: Timeline, peers: dict[int, int], others: tuple[int, ...]) -> bool:
    """Whether the others have made the calls of the line at which ranks wait, in this batch, and completed them.

    They have sent to and received from one another, then: what the waiting ranks call is what does not fit. All others
    wait in a call that Lightning makes on all ranks in every step.
    """
    if len(others) < 2 or not all(_is_in_backward(view, rank, view.facts[next(iter(peers))]) for rank in others):
        return False
    return all(_is_at_line_of_all(view, rank) or _is_recorded(view, rank, others) for rank in peers)


def _is_in_backward(view: Timeline, rank: int, other: RankFacts) -> bool:
    """Whether a rank exchanges gradients with all others, in the batch whose training_step another rank is in."""
    call, now, then = view.activities[rank].collective, view.facts[rank].progress, other.progress
    members = view.groups_by_name[call.group].members if call is not None and call.group in view.groups_by_name else ()
    is_this_batch = (now.phase, now.epoch, now.batch_idx) == (then.phase, then.epoch, then.batch_idx)
    is_past = view.activities[rank].hook == "backward" and not any(
        hook_words(action.name) == _STEP for action in now.actions
    )
    return len(members) == view.job.world_size and is_this_batch and is_past and not in_own_call(view, rank)


def _is_at_line_of_all(view: Timeline, rank: int) -> bool:
    """Whether a rank is in a send or receive that every rank makes once in its training_step, by the source."""
    facts = view.facts[rank]
    if facts.steps.peer < 0 or outstanding_p2p(facts) is not None or view.activities[rank].hook != _STEP:
        return False
    inside = inside_trainer(facts.stack)
    own = [index for index, frame in enumerate(inside) if frame.user]
    way = inside[own[0] : own[-1] + 1] if own else ()
    # Other libraries may call the user's code on some ranks only.
    is_known = all(frame.user or MODULE_CALLS.has(frame.file, frame.function) for frame in way)
    users = [frame for frame in way if frame.user]
    are_unconditional = all(
        frame.code and all(branch.on is Decides.COMMON for branch in frame.branches) for frame in users
    )
    return bool(users) and is_known and are_unconditional


def _is_recorded(view: Timeline, rank: int, others: tuple[int, ...]) -> bool:
    """Whether the others have completed calls from the line of a rank's send or receive with one another.

    Those since the last collective before it count. Gloo records none.
    """
    calls = view.facts[rank].collectives
    pending = outstanding_p2p(view.facts[rank])
    if pending is None or not pending.site:
        return False
    before = [call for call in itertools.takewhile(lambda call: call is not pending, calls) if not call.is_p2p]
    return bool(before) and all(
        any(
            call.is_p2p
            and call.completed
            and call.site == pending.site
            and (end := other_end(call, view.groups_by_name[call.group].members)) is not None
            and end[1] in others
            for call in _since(view.facts[other].collectives, before[-1])
        )
        for other in others
    )


def _since(calls: Iterable[Collective], last: Collective) -> Iterator[Collective]:
    """The calls after the one with the group and number of another rank's."""
    after = itertools.dropwhile(lambda call: call.is_p2p or (call.group, call.seq) != (last.group, last.seq), calls)
    return itertools.islice(after, 1, None)


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
    places = ranks_by({rank: place_words(view.activities[rank].frame) for rank in sides})
    parts = [f"{clause(ranks, 'waits|wait')} {place}" for place, ranks in places.items()]
    batch = batch_words(view.facts[sides[0]].progress)
    awaited = {kind for rank in sides for kind in view.facts[rank].steps.awaited}
    begun = {view.facts[rank].steps.begun_at for rank in sides}
    place = begun.pop() if len(begun) == 1 else ""
    at = f" (begun at {short_place(place)})" if place else ""
    what = "a send" if awaited == {"send"} else "a receive" if awaited == {"recv"} else "sends or receives"
    never = f"{at} that never {'completes' if what.startswith('a ') else 'complete'}"
    first = f"{', '.join(parts)}, {batch}, for {what}{never}: nothing on the other side matches."
    frames = {location_of(view.activities[rank].frame) for rank in sides}
    return finding(
        view,
        sides,
        joined((first, _others(view, sides))),
        location=place or (frames.pop() if len(frames) == 1 else ""),
        evidence=_evidence(view, sides),
    )


def _others(view: Timeline, sides: tuple[int, ...]) -> str:
    others = view.waiting_besides(sides)
    return f"{capitalised(clause(others, 'waits|wait'))} for them." if others else ""


def _evidence(view: Timeline, sides: tuple[int, ...]) -> Iterator[Evidence]:
    yield from stack_evidence(view, sides)
    # The recorder shows nothing of groups whose calls are unknown.
    recorded = tuple(rank for rank in sides if not view.facts[rank].unrecorded)
    if recorded:
        text = f"{capitalised(ranks_words(recorded))}: no collective called there is outstanding."
        yield Evidence(source="flight recorder", text=text)
