"""Who is in a process group, and how many ranks there are, as far as logs let one conclude."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from lightning_ncclsafe.reading.groups import DEFAULT_GROUP
from lightning_ncclsafe.reading.rank_log import UNKNOWN_GROUP, RankLog
from lightning_ncclsafe.reading.values import MOST_RANKS
from lightning_ncclsafe.reading.watchdog import TimedOut

_Called = tuple[str, tuple[int, ...] | None, int | None]
_SIZED = (
    "all_gather",
    "_all_gather_base",
    "all_gather_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_coalesced",
)


class Membership:
    """What follows from all that logs have said.

    Attributes:
        size: Number of ranks of the job; 0 where nothing tells.
        members: Global ranks of the groups, as far as they are known.
    """

    def __init__(self, all_said: Collection[RankLog], size: int) -> None:
        """Takes what was said of all ranks, and the number of ranks where a log gives it; 0 otherwise."""
        _complete(all_said)
        _mix(all_said)
        _adopt(all_said)
        speakers: dict[str, set[int]] = defaultdict(set)
        sizes: dict[str, int] = defaultdict(int)
        for said in all_said:
            for group in said.standings:
                speakers[group].add(said.rank)
            for call in said.timeouts.values():
                group = said.group_of(call)
                speakers[group].add(said.rank)
                sizes[group] = max(sizes[group], _ranks_in(call))
        alike = _numbered_alike(all_said) & speakers.keys()
        self.size = max([size, *(sizes[group] for group in alike)])
        self.members = {
            group: tuple(sorted(ranks)) for group, ranks in speakers.items() if group != DEFAULT_GROUP[0]
        } | self._of_all(alike, sizes, all_said)

    def _of_all(
        self, alike: Iterable[str], sizes: dict[str, int], all_said: Iterable[RankLog]
    ) -> dict[str, tuple[int, ...]]:
        """Groups that all ranks of the job are in."""
        if not self.size:
            return {}
        everybody = tuple(range(max([self.size, *(said.rank + 1 for said in all_said)])))
        whole = {group for group in alike if group == DEFAULT_GROUP[0] or sizes[group] == self.size}
        return dict.fromkeys(whole, everybody)


def _complete(all_said: Iterable[RankLog]) -> None:
    """Of a rank that does not say in which group it waits, another one does that waits in the same."""
    known: dict[tuple[int, str], set[str]] = defaultdict(set)
    for said in all_said:
        for call in said.timeouts.values():
            if call.seq in said.at:
                known[(call.seq, call.op)].add(said.at[call.seq])
    for said in all_said:
        for call in said.timeouts.values():
            groups = known.get((call.seq, call.op), set())
            if len(groups) == 1:
                said.at.setdefault(call.seq, next(iter(groups)))


def _mix(all_said: Iterable[RankLog]) -> None:
    """A watchdog gives up one collective of its group: whose rank gave up several has several groups.

    Where none of them has a name, a number on one rank is not comparable with another one on another rank.
    """
    nameless = [
        {call.seq for call in said.timeouts.values() if call.seq and call.seq not in said.at} for said in all_said
    ]
    is_mixed = any(len(seqs) > 1 for seqs in nameless)
    for said in all_said:
        said.is_mixed = is_mixed
    unknown = {
        call.seq
        for said in all_said
        for call in said.timeouts.values()
        if said.group_of(call) == UNKNOWN_GROUP and call.seq
    }
    for said in all_said:
        said.is_apart = len(unknown) > 1


def _adopt(all_said: Iterable[RankLog]) -> None:
    """Of a rank that says only at which number it stands, the others say what that is, if they agree.

    Otherwise it waits there in an operation that is not known.
    """
    known: dict[tuple[str, int], set[_Called]] = defaultdict(set)
    for said in all_said:
        for call in said.timeouts.values():
            known[(said.group_of(call), call.seq)].add((call.op, call.takes, call.gives))
    for said in all_said:
        theirs = {(said.group_of(call), call.seq) for call in said.timeouts.values()}
        for place in said.waits_at():
            if place not in theirs:
                calls = known.get(place, set())
                op, takes, gives = next(iter(calls)) if len(calls) == 1 else ("", None, None)
                said.has_timed_out(TimedOut(place[1], op, takes, gives, 0, 0, None))
                said.at.setdefault(place[1], place[0])


def _numbered_alike(all_said: Iterable[RankLog]) -> set[str]:
    """Groups in which every rank that is seen has the same number as in the job."""
    alike: dict[str, bool] = defaultdict(lambda: True)
    for said in all_said:
        for name, standing in said.standings.items():
            alike[name] &= standing.rank == said.rank
        for call in said.timeouts.values():
            alike[said.group_of(call)] &= call.rank in (None, said.rank)
    return {name for name, same in alike.items() if same and not name.startswith(UNKNOWN_GROUP)}


def _ranks_in(call: TimedOut) -> int:
    """Of a gather, what comes out is as much as goes in, times the number of ranks; 0 where that is not known."""
    if call.op not in _SIZED or not call.takes or not call.gives or len(call.takes) != 1:
        return 0
    small, large = sorted((call.takes[0], call.gives))
    return min(large // small, MOST_RANKS) if small > 0 and large % small == 0 else 0
