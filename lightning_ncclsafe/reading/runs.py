"""Whether dumps are of one moment of one run: all ranks must have called what has ended on one."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from lightning_ncclsafe.facts import Collective, Group, RankFacts
from lightning_ncclsafe.facts.wording import group_words, ranks_words
from lightning_ncclsafe.reading.groups import DEFAULT_GROUP
from lightning_ncclsafe.rules.kit.waits import caller_of

# These end on no rank before all have called them.
_OF_ALL = ("all_", "allgather", "allreduce", "_allgather", "reduce_scatter", "_reduce_scatter", "barrier")
# Counters do not show operations: a root may have completed this many broadcasts before the others call them.
_BROADCASTS = 4
# Last calls cannot be this far apart: a timeout would have ended the run.
_APART_NS = 6 * 3600 * 1_000_000_000
# After a timeout, PyTorch ends a process within some 17 minutes; clocks of hosts are a few minutes apart at most.
_ENDS_NS = 30 * 60 * 1_000_000_000
_OLDER = (
    "The dumps of {ranks} are older than the others, or from another run: in {group}, other ranks have completed "
    "number {done:,}, while {ranks} had reached only {called:,}. They are left out."
)
_MISNAMED = "The dumps of {ranks} are left out: their process groups are not those of the ranks in their file names."
_ALL_MISNAMED = (
    "All dumps are left out, as the ranks in their file names are not those of the job: {ranks} of {size:,} ranks."
)
_OTHER_RUN = "The dumps of {ranks} are from another run than the others, and are left out: {why}."

# Name, and identity of the members, which all ranks of a group share.
_Key = tuple[str, int]
Dumps = Mapping[int, RankFacts]
Find = Callable[[Dumps], Iterable[tuple[list[int], str]]]


class Apart(NamedTuple):
    """Which dumps do not belong to the others.

    Attributes:
        ranks: Ranks whose dumps do not.
        older: Those of an earlier moment, ascending.
        doubtful: Ranks whose dumps may be of an earlier run, or have a wrong clock.
        reasons: Why, one sentence for each reason.
    """

    ranks: frozenset[int]
    older: tuple[int, ...]
    doubtful: frozenset[int]
    reasons: tuple[str, ...]


def apart(dumps: Dumps) -> Apart:
    """The dumps that cannot be of the same moment of the same run as the latest."""
    found: dict[Find, set[int]] = defaultdict(set)
    reasons: list[str] = []
    for find in (_misnamed, _of_other_members, _of_other_times, _of_another_start, _older):
        left_out = set().union(*found.values())
        for ranks, reason in find({rank: facts for rank, facts in dumps.items() if rank not in left_out}):
            found[find] |= set(ranks)
            reasons.append(reason)
    excluded = frozenset(rank for ranks in found.values() for rank in ranks)
    doubtful = _early({rank: facts for rank, facts in dumps.items() if rank not in excluded})
    return Apart(excluded, tuple(sorted(found[_older])), frozenset(doubtful), tuple(reasons))


def latest_ns(facts: RankFacts) -> int:
    """When the rank called its last collective; 0 if unknown."""
    return max((call.created_ns for call in facts.collectives), default=0)


def _misnamed(dumps: Dumps) -> Iterable[tuple[list[int], str]]:
    """A process knows the groups of which it is a member, and records in each send and receive which member it is."""
    groups = (group for facts in dumps.values() for group in facts.groups)
    everybody = {one.ranks for one in groups if one.ranks and (one.name, one.description) == DEFAULT_GROUP}
    size = len(next(iter(everybody))) if len(everybody) == 1 else 0
    beyond = [rank for rank in sorted(dumps) if rank >= size > 0]
    if beyond:
        # If names count ranks from 1, all other names are wrong, too.
        yield sorted(dumps), _ALL_MISNAMED.format(ranks=ranks_words(beyond), size=size)
        return
    found = [rank for rank, facts in sorted(dumps.items()) if _is_of_another(rank, facts)]
    if found:
        yield found, _MISNAMED.format(ranks=ranks_words(found))


def _is_of_another(rank: int, facts: RankFacts) -> bool:
    members = {group.name: group.ranks for group in facts.groups if group.ranks}
    if any(rank not in there for there in members.values()):
        return True
    callers = (caller_of(call, members.get(call.group, ())) for call in facts.collectives if call.is_p2p)
    return any(caller not in (None, rank) for caller in callers)


def _of_other_members(dumps: Dumps) -> Iterable[tuple[list[int], str]]:
    """All ranks of a run agree on how many there are."""
    sizes: dict[int, list[int]] = defaultdict(list)
    for rank, facts in dumps.items():
        for group in facts.groups:
            if group.name == DEFAULT_GROUP[0] and group.ranks:
                sizes[len(group.ranks)].append(rank)
    if len(sizes) > 1:
        kept = max(sizes, key=lambda size: max(latest_ns(dumps[rank]) for rank in sizes[size]))
        ranks = sorted(rank for size, who in sizes.items() if size != kept for rank in who)
        said = " or ".join(f"{size:,}" for size in sorted(sizes) if size != kept)
        yield ranks, _OTHER_RUN.format(ranks=ranks_words(ranks), why=f"that had {said} ranks, this one has {kept:,}")


def _of_other_times(dumps: Dumps) -> Iterable[tuple[list[int], str]]:
    """Ranks of a run call the same number of a group at about the same time; clocks are minutes apart at most."""
    moments = {rank: moment for rank, facts in dumps.items() if (moment := latest_ns(facts))}
    newest = max(moments.values(), default=0)
    # A rank may be late by its own timeout.
    timeout_ns = {rank: max(call.timeout_ms for call in dumps[rank].collectives) * 1_000_000 for rank in moments}
    ranks = sorted(rank for rank, moment in moments.items() if newest - moment > _APART_NS + timeout_ns[rank])
    if ranks:
        hours = min(newest - moments[rank] for rank in ranks) // 3_600_000_000_000
        why = f"their last calls were more than {hours} h before those of the others"
        yield ranks, _OTHER_RUN.format(ranks=ranks_words(ranks), why=why)


def _of_another_start(dumps: Dumps) -> Iterable[tuple[list[int], str]]:
    """Dumps with other times, unless their numbers fit those of the others: then it may be the clock of a host."""
    early = _early(dumps)
    if early and not _fit(dumps, early):
        why = "their calls were long before those of the others, and their numbers do not fit"
        yield sorted(early), _OTHER_RUN.format(ranks=ranks_words(early), why=why)


def _early(dumps: Dumps) -> set[int]:
    """Ranks that called what others called under one number too early, or whose wait was over before others called.

    A collective that has ended was called by all ranks within its timeout; one that has not ended within it ends the
    run.
    """
    newest = max(map(latest_ns, dumps.values()), default=0)
    latest: dict[tuple[str, int], int] = defaultdict(int)
    timed: list[tuple[int, Collective]] = []
    for rank, facts in dumps.items():
        one = {group.name for group in facts.groups if _is_one(group)}
        for call in facts.collectives:
            if not call.is_p2p and call.created_ns and call.timeout_ms and (call.group in one or not call.completed):
                timed.append((rank, call))
                if call.completed:
                    latest[call.group, call.seq] = max(latest[call.group, call.seq], call.created_ns)
    return {
        rank
        for rank, call in timed
        if (latest[call.group, call.seq] if call.completed else newest) - call.created_ns
        > call.timeout_ms * 1_000_000 + _ENDS_NS
    }


def _fit(dumps: Dumps, early: set[int]) -> bool:
    """Whether these and the others have called what the respective others have completed."""
    of_early: dict[_Key, list[Group]] = defaultdict(list)
    of_others: dict[_Key, list[Group]] = defaultdict(list)
    for rank, facts in dumps.items():
        for group in facts.groups:
            if group.last_enqueued and not group.is_mixed and _is_one(group):
                (of_early if rank in early else of_others)[group.name, id(group.ranks)].append(group)
    return all(
        max(group.last_completed for group in one) <= min(group.last_enqueued for group in other)
        for key in of_early.keys() & of_others.keys()
        for one, other in ((of_early[key], of_others[key]), (of_others[key], of_early[key]))
    )


def _older(dumps: Dumps) -> Iterable[tuple[list[int], str]]:
    # In a group without collectives, counters may be those of sends and receives.
    seen = {call.group for facts in dumps.values() for call in facts.collectives if not call.is_p2p}
    done: dict[_Key, int] = defaultdict(int)
    called_in: dict[_Key, dict[int, int]] = defaultdict(dict)
    numbered_apart: set[str] = set()
    for rank, facts in dumps.items():
        ended = _ended(facts, numbered_apart, seen)
        for group in filter(_is_one, facts.groups):
            key = group.name, id(group.ranks)
            done[key] = max(done[key], ended.get(group.name, 0))
            called_in[key][rank] = group.last_enqueued
    for name, members in sorted(done):
        most = done[name, members]
        called = {rank: seq for rank, seq in called_in[name, members].items() if 0 < seq < most}
        if called and name not in numbered_apart:
            where, last = group_words(name), max(called.values())
            yield sorted(called), _OLDER.format(ranks=ranks_words(called), group=where, done=most, called=last)


def _ended(facts: RankFacts, numbered_apart: set[str], seen: set[str]) -> dict[str, int]:
    """The last number of each group that ended here, so that all ranks had called it."""
    ended: dict[str, int] = {}
    left_early: set[tuple[str, int]] = set()
    for call in facts.collectives:
        if call.is_p2p:
            # Some versions include sends and receives, of which ranks have different numbers.
            numbered_apart.add(call.group)
        elif call.completed and call.op.startswith(_OF_ALL):
            ended[call.group] = max(ended.get(call.group, 0), call.seq)
        elif call.completed:
            left_early.add((call.group, call.seq))
    for group in facts.groups:
        if group.name in seen and not group.is_mixed:
            last = group.last_completed
            while (group.name, last) in left_early:
                last -= 1
            ended[group.name] = max(ended.get(group.name, 0), min(last, group.last_completed - _BROADCASTS))
    return ended


def _is_one(group: Group) -> bool:
    """Whether the name means one group; groups of unknown members may share it."""
    return bool(group.ranks) or group.name == DEFAULT_GROUP[0]
