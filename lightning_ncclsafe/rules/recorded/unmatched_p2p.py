"""The cause unmatched-p2p: a send or receive whose other side was never called, mostly between pipeline stages."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import Collective, JobFacts, RankFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.recorded.ended import gone
from lightning_ncclsafe.rules.recorded.telling import LOOK_THERE, call_site, told
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, location_of, ranks_words, verb

_REMEDY = (
    "Look at what the rank that is waited for does instead: another number of microbatches, a stage that works "
    "alone or has failed, sends and receives in another order than on its neighbour. Where ranks wait for one another "
    "in a circle, pair each send with its receive in dist.batch_isend_irecv. "
) + LOOK_THERE
# "send 0->1", "recv 1<-0", in ranks of the group: the one that calls stands first.
_ENDS = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")
_LONGEST_CHAIN = 10_000
_LISTED = 6


class Wait(NamedTuple):
    """What a rank waits in, and the rank that it waits for."""

    call: Collective
    peer: int


def unmatched_p2p(job: JobFacts) -> Iterable[Finding]:
    """Ranks wait in a send or receive, and following who waits for whom leads to one rank, or in a circle.

    Symptom:
        "nccl:recv 1<-0" that has not completed on rank 1, without a send on rank 0; timeouts with OpType=RECV.

    Cause:
        Pipeline stages that disagree about the number or the order of what they exchange; a stage that is elsewhere.

    Remedy:
        Look at what the rank at the end of the chain does instead.

    Cannot see:
        Operations that were started together and recorded as one, where the recorder did not keep their parts.
    """
    view = timeline(job)
    waits = {rank: wait for rank, facts in sorted(view.facts.items()) if (wait := _wait(facts)) is not None}
    if not waits or gone(view):
        return
    ends: dict[int, list[int]] = defaultdict(list)
    for rank in waits:
        ends[_end(waits, rank)].append(rank)
    # A rank at the end that waits for others in a collective is explained by what they wait for.
    for end, ranks in ends.items():
        if end in waits or end not in view.facts or not view.waits(end):
            yield _finding(view, waits, end, ranks)
            return


def pending_p2p(facts: RankFacts) -> Iterator[Collective]:
    """Sends and receives that have not completed, the oldest first.

    Of what was started together only the whole is seen to end; what comes after it on the device ends after it.
    """
    done: dict[str, int] = defaultdict(lambda: -1)
    for call in facts.collectives:
        if call.is_p2p and call.completed:
            done[call.group] = max(done[call.group], call.seq)
    yield from (
        call for call in facts.collectives if call.is_p2p and not call.completed and call.seq > done[call.group]
    )


def _wait(facts: RankFacts) -> Wait | None:
    for call in pending_p2p(facts):
        ends = _ENDS.match(call.op)
        members = next((group.ranks for group in facts.groups if group.name == call.group), ())
        number = int(ends[3]) if ends else -1
        if 0 <= number < len(members):
            return Wait(call, members[number])
    return None


def _end(waits: dict[int, Wait], rank: int) -> int:
    """The rank at the end of the chain; of a circle its lowest."""
    path = {rank: None}
    while rank in waits and len(path) < _LONGEST_CHAIN:
        rank = waits[rank].peer
        if rank in path:
            circle = list(path)[list(path).index(rank) :]
            return min(circle)
        path[rank] = None
    return rank


def _finding(view: Timeline, waits: dict[int, Wait], end: int, ranks: list[int]) -> Finding:
    is_circle = end in waits
    circle = _circle(waits, end) if is_circle else (end,)
    chain = [f"rank {rank} waits in {waits[rank].call.op} for rank {waits[rank].peer}" for rank in ranks[:_LISTED]]
    if is_circle:
        tail = f"{ranks_words(circle)} {verb(circle, 'waits', 'wait')} for one another in a circle"
    elif end in view.facts:
        tail = f"rank {end} waits for nobody, and has not called the other side"
    else:
        tail = f"nothing was read of rank {end}"
    site = call_site(waits[ranks[0]].call)
    return Finding(
        rule="unmatched-p2p",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY if is_circle or end in view.facts else Confidence.POSSIBLE,
        summary=f"{capitalised('; '.join(chain))}: {tail}.",
        ranks=circle,
        location=location_of(site) if is_circle else "",
        evidence=tuple(
            Evidence(source="flight recorder", rank=rank, text=f"Has not completed {told(waits[rank].call)}.")
            for rank in ranks[:_LISTED]
        ),
        remedy=_REMEDY,
    )


def _circle(waits: dict[int, Wait], start: int) -> tuple[int, ...]:
    found, rank = {start}, waits[start].peer
    while rank != start:
        found.add(rank)
        rank = waits[rank].peer
    return tuple(sorted(found))
