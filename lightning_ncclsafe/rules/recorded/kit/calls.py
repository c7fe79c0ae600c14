"""What ranks have called, according to dumps and logs: sends and receives, idle ranks, and all calls of a job."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum

from lightning_ncclsafe.facts import Collective, Group, JobFacts, RankFacts, RecordFacts
from lightning_ncclsafe.rules.kit import (
    GroupView,
    Timeline,
    has_given_up,
    lost_words,
    numel,
    other_end,
    outstanding_p2p,
)

# These end on no rank before all have called them.
_OF_ALL = ("all_", "_all", "allgather", "allreduce", "reduce_scatter", "_reduce_scatter", "barrier")
OTHER_KIND = {"send": "recv", "recv": "send"}

Op = tuple[str, int]
"""Group and number of a collective."""


class Seen(Enum):
    """What is known about a rank and a number of a group."""

    OPEN = "open"
    ENDED = "ended"
    ABSENT = "absent"
    CALLED = "called"
    """Called; unknown whether it has ended."""
    UNKNOWN = "unknown"
    UNREAD = "unread"


def record_of(facts: RankFacts) -> RecordFacts:
    """What was read about a rank; the record of one about which nothing was."""
    return facts.record or RecordFacts()


def has_dumps(job: JobFacts) -> bool:
    """Whether dumps were read, so that it is known what ranks have called."""
    return any(record_of(facts).has_dump for facts in job.ranks)


def has_logs(job: JobFacts) -> bool:
    """Whether lines of ranks in logs were read."""
    return any(record_of(facts).has_log for facts in job.ranks)


def has_moved(job: JobFacts) -> bool:
    """Whether the job still moved when it was dumped.

    A quarter of the dumps are older than others, or something had just ended on half of the ranks.
    """
    if len(job.outdated) > 1 and len(job.outdated) * 4 >= job.world_size:
        return True
    moving = [record.is_moving for record in map(record_of, job.ranks) if record.has_dump]
    return 2 * sum(moving) >= max(len(moving), 1)


def open_calls(facts: RankFacts) -> list[Collective]:
    """Collectives, sends and receives that are not known to have completed, the oldest first."""
    return [call for call in facts.collectives if not call.completed]


def has_called_in(view: Timeline, rank: int, group: str) -> bool:
    """Whether any call of this rank in a group is known."""
    facts = view.facts.get(rank)
    return facts is not None and any(own.name == group for own in facts.groups)


def idle_behind(view: Timeline, group: GroupView) -> tuple[int, ...]:
    """Members that are known not to have called what others wait in, and that wait for nothing themselves."""
    return tuple(
        rank
        for rank in group.behind
        if has_called_in(view, rank, group.name) and not view.waits(rank) and outstanding_p2p(view.facts[rank]) is None
    )


def behind_elsewhere(view: Timeline, group: GroupView) -> tuple[int, ...]:
    """Members that are known not to have called what others wait in, and that lost a connection of another back end.

    They have no call of NCCL's open: what they waited for, they waited for elsewhere.
    """
    return tuple(
        rank
        for rank in group.behind
        if has_called_in(view, rank, group.name)
        and view.waits(rank)
        and not open_calls(view.facts[rank])
        and _lost_another(view.facts[rank])
    )


def _lost_another(facts: RankFacts) -> bool:
    """Whether a connection was lost that is not NCCL's, and not by a timeout."""
    return "NCCL" not in lost_words(facts) and bool(lost_words(facts)) and not has_given_up(facts)


def end_of(view: Timeline, call: Collective) -> tuple[str, int] | None:
    """``("send", 4)``: the kind of a send or receive, and the rank of its other side; None if that is unknown."""
    group = view.groups_by_name.get(call.group)
    return other_end(call, group.members) if group is not None and call.is_p2p else None


def waits_for_all(call: Collective) -> bool:
    """Whether it ends on no rank before all have called it; a broadcast may end earlier on its root."""
    return call.op.startswith(_OF_ALL) and call.backend.startswith("nccl")


class Calls:
    """The calls of all ranks.

    Attributes:
        view: The job.
        members: Members of each group, by its name.
        groups: Groups of each rank, by name.
        open: Calls of each rank that are not known to have ended, oldest first.
        waits: The oldest collective of each group among these.
        ends: The oldest send and receive with each peer among these, by group, kind and peer.
        calls: Open collectives by group and number, then by rank.
        timed: Ranks whose dumps show what their devices have started, with TORCH_NCCL_ENABLE_TIMING.
        lost: Ranks whose ring may have lost what their devices are in.
    """

    def __init__(self, view: Timeline) -> None:
        self.view = view
        self.members = {group.name: group.members for group in view.groups}
        self.groups: dict[int, dict[str, Group]] = {
            rank: {group.name: group for group in facts.groups} for rank, facts in view.facts.items()
        }
        self.open = {rank: open_calls(facts) for rank, facts in view.facts.items()}
        # The first number that is still in a rank's ring, if dumps include what has ended.
        self._first: dict[tuple[int, str], int] = {}
        with_ended = sum(any(one.completed for one in facts.collectives) for facts in view.facts.values())
        self._has_ended, self._is_whole = with_ended > 0, 2 * with_ended > len(self.open)
        # Sends and receives between two ranks, if dumps have counted them all.
        self._pairs: dict[tuple[int, str, str, int], dict[int, Collective]] = defaultdict(dict)
        self._counts = {
            (rank, call.group) for rank, facts in view.facts.items() for call in facts.collectives if call.pair_number
        }
        self.calls: dict[Op, dict[int, Collective]] = defaultdict(dict)
        self._ended: dict[Op, set[int]] = defaultdict(set)
        for rank, facts in view.facts.items():
            for call in facts.collectives:
                if call.is_p2p:
                    self._pair(rank, call)
                    continue
                self._first[(rank, call.group)] = min(call.seq, self._first.get((rank, call.group), call.seq))
                if call.completed:
                    self._ended[(call.group, call.seq)].add(rank)
                else:
                    self.calls[(call.group, call.seq)].setdefault(rank, call)
        # The oldest of each group, and the oldest of all; the parts of a batch are one call.
        self.waits = {rank: dict(_oldest_by_group(calls)) for rank, calls in self.open.items()}
        self.ends = {rank: self._ends(rank) for rank in self.open}
        self.timed = {rank for rank in view.facts if self._is_timed(rank)}
        self.lost = {rank for rank in self.open if self._has_lost(rank)}

    def _has_lost(self, rank: int) -> bool:
        """Whether the ring may have lost what a rank's device is in."""
        facts = self.view.facts[rank]
        if record_of(facts).has_lost:
            return True
        first = next(iter(facts.collectives), None)
        # If dumps include ended calls, but none from before the first open call, older calls may be open, too.
        return self._has_ended and first is not None and not first.completed and first.seq > 1

    def _is_timed(self, rank: int) -> bool:
        calls = self.view.facts[rank].collectives
        return any(call.duration_ms is not None or (call.started and not call.completed) for call in calls) or any(
            group.last_started > 0 for group in self.groups[rank].values()
        )

    def is_idle(self, rank: int) -> bool:
        """Whether the rank is known to have nothing outstanding."""
        return record_of(self.view.facts[rank]).is_idle and not self.open[rank]

    def seen(self, rank: int, op: Op) -> Seen:
        """What is known about a rank and a number."""
        facts = self.view.facts.get(rank)
        if facts is None or record_of(facts).is_empty:
            return Seen.UNREAD
        if rank in self.calls.get(op, ()):
            return Seen.OPEN
        group = self.groups[rank].get(op[0])
        if rank in self._ended.get(op, ()):
            return Seen.ENDED
        if group is None:
            return Seen.ABSENT if self.is_idle(rank) else Seen.UNKNOWN
        if op[1] > group.last_enqueued:
            return Seen.ABSENT
        if op[1] <= group.last_completed:
            return Seen.ENDED
        # Streams end out of order: what is not among the open calls has ended, unless the ring has lost it.
        is_lost = self._is_whole and op[1] < self._first.get((rank, op[0]), 0)
        return Seen.ENDED if op[0] in self.waits[rank] and not is_lost else Seen.CALLED

    def has_surely_ended(self, rank: int, op: Op) -> bool:
        """Whether an entry or the counters show the end; a call that is only missing may have been overwritten."""
        group = self.groups[rank].get(op[0]) if rank in self.groups else None
        return rank in self._ended.get(op, ()) or (group is not None and op[1] <= group.last_completed)

    def is_head(self, rank: int, call: Collective) -> bool:
        """Whether a rank's device is known to have nothing older to complete."""
        first = self.open[rank][0]
        same = (call.group, call.seq, call.is_p2p) == (first.group, first.seq, first.is_p2p)
        return same or (call.started and not call.completed)

    def end_of(self, call: Collective) -> tuple[str, int] | None:
        """See :func:`end_of`."""
        return end_of(self.view, call)

    def facing(self, rank: int, call: Collective) -> Collective | None:
        """The oldest open call of a peer that may be the other side of a send or receive; None if there is none."""
        kind, peer = self.end_of(call) or ("", -1)
        return self.ends.get(peer, {}).get((call.group, OTHER_KIND.get(kind, ""), rank))

    def _pair(self, rank: int, call: Collective) -> None:
        end = self.end_of(call)
        if end is not None and call.pair_number:
            self._pairs[rank, call.group, end[0], end[1]][call.pair_number] = call

    def other_side(self, rank: int, call: Collective) -> tuple[Seen, Collective | None]:
        """The state of the other side of a send or receive, and that call if it is open.

        Known only if the dumps of both ranks count their sends and receives from the first.
        """
        end = self.end_of(call)
        if end is None or not call.pair_number or (end[1], call.group) not in self._counts:
            return Seen.UNKNOWN, None
        theirs = self._pairs.get((end[1], call.group, OTHER_KIND[end[0]], rank), {})
        if call.pair_number > max(theirs, default=0):
            return Seen.ABSENT, None
        other = theirs.get(call.pair_number)
        if other is not None and numel(other) != numel(call):
            return Seen.UNKNOWN, None
        return (Seen.ENDED, None) if other is None or other.completed else (Seen.OPEN, other)

    def passed_by(self, rank: int) -> set[int]:
        """The peers of a rank's oldest send, receive or batch, if all of it has ended on them."""
        first = next(iter(self.open[rank]), None)
        if first is None or not first.is_p2p or first.launching:
            return set()
        parts = [c for c in self.open[rank] if c.is_p2p and (c.group, c.seq) == (first.group, first.seq)]
        if any(self.other_side(rank, part)[0] is not Seen.ENDED for part in parts):
            return set()
        ends = map(self.end_of, parts)
        return {end[1] for end in ends if end is not None}

    def _ends(self, rank: int) -> dict[tuple[str, str, int], Collective]:
        found: dict[tuple[str, str, int], Collective] = {}
        for call in self.open[rank]:
            end = self.end_of(call)
            if end is not None:
                found.setdefault((call.group, *end), call)
        return found


def _oldest_by_group(calls: Iterable[Collective]) -> Iterator[tuple[str, Collective]]:
    seen: set[str] = set()
    for call in calls:
        if not call.is_p2p and call.group not in seen:
            seen.add(call.group)
            yield call.group, call
