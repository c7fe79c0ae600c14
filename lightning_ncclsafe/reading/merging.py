"""One job from several files: ranks with a dump and a log, groups of one name, and logs that complete each other."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from lightning_ncclsafe.facts import (
    ExceptionFacts,
    Group,
    Incident,
    IncidentKind,
    JobFacts,
    LogFacts,
    RankFacts,
    RecordFacts,
)
from lightning_ncclsafe.facts.wording import ranks_words, short_location
from lightning_ncclsafe.reading.groups import DEFAULT_GROUP
from lightning_ncclsafe.reading.rank_log import UNKNOWN_GROUP, RankLog
from lightning_ncclsafe.reading.values import MOST_RANKS
from lightning_ncclsafe.reading.watchdog import TimedOut
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame

_UNSIZED = (
    "Nothing that was read says how many ranks the job has: it had {size} or more. Ranks without a dump or a log may "
    "be missing from this report."
)

_Called = tuple[str, tuple[int, ...] | None, int | None]
_SIZED = (
    "all_gather",
    "_all_gather_base",
    "all_gather_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_coalesced",
)

_LONGEST = 300


def job_of(
    dumps: Mapping[int, RankFacts],
    rank_logs: Collection[RankLog],
    size: int,
    *,
    unnamed: Iterable[ExceptionFacts] = (),
    missing: Iterable[str] = (),
    outdated: Collection[int] = (),
    left_out: Collection[int] = (),
    log: LogFacts | None = None,
) -> JobFacts:
    """One job of all that was read.

    Args:
        dumps: Facts from dumps, by rank.
        rank_logs: What logs say about each rank.
        size: The number of ranks, if a log gives it; 0 otherwise.
        unnamed: Exceptions of unknown ranks.
        missing: What could not be read, one sentence each.
        outdated: Ranks whose dumps are of an earlier moment, and are not among these.
        left_out: Ranks whose dumps are not among these for another reason.
        log: What logs say beyond single ranks.
    """
    membership = Membership(rank_logs, size)
    logs = {one.rank: one.facts(membership.members) for one in rank_logs}
    all_facts = [
        _joined(dumps[rank], logs[rank]) if rank in dumps and rank in logs else (dumps.get(rank) or logs[rank])
        for rank in sorted(dumps.keys() | logs.keys())
    ]
    ranks = _unmixed(_distinct(all_facts))
    counted = max([membership.size, *_sizes(dumps.values())])
    world_size = max([counted, *_seen(ranks), *(rank + 1 for rank in outdated)])
    is_sized = counted > 0
    size_words = f"{world_size:,} rank{'s' * (world_size != 1)}"
    unsized = (_UNSIZED.format(size=size_words),) if world_size and not is_sized else ()
    # One copy for all ranks, as it is long in large jobs.
    members = ranks_by_group(ranks) | {DEFAULT_GROUP[0]: tuple(range(world_size)) if counted else ()}
    return JobFacts(
        incident=_incident(ranks),
        world_size=world_size,
        ranks=tuple(lived_on([_with_members(facts, members) for facts in ranks])),
        missing=(*missing, *unsized),
        unnamed=tuple(unnamed),
        is_sized=is_sized,
        outdated=tuple(outdated),
        left_out=tuple(rank for rank in left_out if rank < world_size),
        log=log or LogFacts(),
    )


def later(one: RankFacts, other: RankFacts) -> tuple[RankFacts, tuple[str, ...]]:
    """Two dumps of a rank as one, with the later state of each group; and the groups that both have."""
    first = {group.name: group for group in one.groups}
    taken = {group.name: group for group in other.groups if _is_later(other, one, group, first.get(group.name))}
    both = tuple(group.name for group in other.groups if group.name in first)
    calls = [call for call in one.collectives if call.group not in taken]
    calls += [call for call in other.collectives if call.group in taken]
    calls.sort(key=lambda call: call.created_ns)
    groups = (*(group for group in one.groups if group.name not in taken), *taken.values())
    record = _of_both(one.record, other.record)
    if both:
        record = other.record if taken.keys() & set(both) else one.record
    return replace(one, groups=groups, collectives=tuple(calls), record=record), both


def _of_both(one: RecordFacts | None, other: RecordFacts | None) -> RecordFacts | None:
    """What two recorders of one rank say together."""
    if one is None or other is None:
        return one or other
    return replace(
        one,
        is_idle=one.is_idle and other.is_idle,
        is_empty=one.is_empty and other.is_empty,
        is_blank=one.is_blank and other.is_blank,
        is_moving=one.is_moving or other.is_moving,
        has_lost=one.has_lost or other.has_lost,
    )


def _is_later(new: RankFacts, old: RankFacts, group: Group, before: Group | None) -> bool:
    """By the clock, as a restarted run counts from the beginning; without times, by numbers."""
    if before is None:
        return True
    ours, theirs = _last_ns(new, group.name), _last_ns(old, group.name)
    return ours > theirs if ours and theirs and ours != theirs else group.last_enqueued > before.last_enqueued


def _last_ns(facts: RankFacts, group: str) -> int:
    return max((call.created_ns for call in facts.collectives if call.group == group), default=0)


def _joined(dump: RankFacts, log: RankFacts) -> RankFacts:
    """The groups are those of the dump; how the rank ended is in the log."""
    known = {group.name for group in dump.groups if group.last_enqueued}
    record = log.record or RecordFacts()
    return replace(
        dump,
        host=log.host,
        groups=(
            *(group for group in dump.groups if group.name in known),
            *(group for group in log.groups if group.name not in known),
        ),
        collectives=(*dump.collectives, *(call for call in log.collectives if call.group not in known)),
        exception=log.exception,
        record=replace(record, has_dump=True, group_known=True),
    )


def _sizes(dumps: Iterable[RankFacts]) -> list[int]:
    """The number of ranks, by the members of default groups."""
    groups = (group for facts in dumps for group in facts.groups)
    return [group.ranks[-1] + 1 for group in groups if group.name == DEFAULT_GROUP[0] and group.ranks]


def _seen(ranks: Iterable[RankFacts]) -> Iterator[int]:
    """Lower bounds of the number of ranks."""
    for facts in ranks:
        yield facts.rank + 1
        yield from (group.ranks[-1] + 1 for group in facts.groups if group.ranks)


def _distinct(all_facts: list[RankFacts]) -> list[RankFacts]:
    """Gives groups that share a name but have different members different names."""
    # By identity first: equal ones are long, and mostly the same object.
    members: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for facts in all_facts:
        for group in facts.groups:
            if group.ranks:
                members[group.name][id(group.ranks)] = group.ranks
    shared = {name for name, variants in members.items() if len(set(variants.values())) > 1}
    return [renamed(facts, _with_ranks(facts, shared)) for facts in all_facts] if shared else all_facts


def _with_ranks(facts: RankFacts, shared: set[str]) -> dict[str, str]:
    return {g.name: f"{g.name} of {ranks_words(g.ranks)}" for g in facts.groups if g.name in shared and g.ranks}


def renamed(facts: RankFacts, names: Mapping[str, str]) -> RankFacts:
    """The same facts with other names for some groups."""
    return replace(
        facts,
        groups=tuple(replace(group, name=names.get(group.name, group.name)) for group in facts.groups),
        collectives=tuple(replace(call, group=names.get(call.group, call.group)) for call in facts.collectives),
    )


def _unmixed(all_facts: list[RankFacts]) -> list[RankFacts]:
    """Counters include sends and receives: if any member has some, no member's counters show collectives."""
    mixed = {group.name for facts in all_facts for group in facts.groups if group.is_mixed}
    return [_by_entries(facts, mixed) for facts in all_facts] if mixed else all_facts


def _by_entries(facts: RankFacts, mixed: set[str]) -> RankFacts:
    groups = []
    for group in facts.groups:
        if group.name not in mixed or group.is_mixed:
            groups.append(group)
            continue
        calls = [call for call in facts.collectives if call.group == group.name]
        if calls:
            called = max(call.seq for call in calls)
            done = min((call.seq - 1 for call in calls if not call.completed), default=called)
            groups.append(replace(group, last_enqueued=called, last_completed=done, is_mixed=True))
        elif group.name == DEFAULT_GROUP[0] and not group.last_enqueued:
            groups.append(group)
    return replace(facts, groups=tuple(groups))


def ranks_by_group(ranks: Iterable[RankFacts]) -> dict[str, tuple[int, ...]]:
    """The ranks that list each group, by its name."""
    found: dict[str, list[int]] = defaultdict(list)
    for facts in ranks:
        for group in facts.groups:
            found[group.name].append(facts.rank)
    return {name: tuple(who) for name, who in found.items()}


def _with_members(facts: RankFacts, members: Mapping[str, tuple[int, ...]]) -> RankFacts:
    """The facts with members: all ranks for the default group, otherwise the ranks that list the group."""
    groups = (group if group.ranks else replace(group, ranks=members[group.name]) for group in facts.groups)
    return replace(facts, groups=tuple(groups))


def _incident(ranks: Collection[RankFacts]) -> Incident:
    calls = [call for facts in ranks for call in facts.collectives]
    return Incident(
        number=1,
        kind=IncidentKind.RECORDED,
        opened_by=min((facts.rank for facts in ranks), default=0),
        opened_ns=max((call.created_ns for call in calls), default=0),
        timeout_s=max((call.timeout_ms for call in calls if not call.completed), default=0) / 1e3,
    )


class Membership:
    """What follows from all logs together.

    Attributes:
        size: Number of ranks of the job; 0 if unknown.
        members: Global ranks of the groups, if known.
    """

    def __init__(self, rank_logs: Collection[RankLog], size: int) -> None:
        """Takes what was said about all ranks, and the number of ranks if a log gives it, otherwise 0."""
        _complete(rank_logs)
        _mix(rank_logs)
        _adopt(rank_logs)
        speakers: dict[str, set[int]] = defaultdict(set)
        sizes: dict[str, int] = defaultdict(int)
        for one in rank_logs:
            for group in one.standings:
                speakers[group].add(one.rank)
            for call in one.timeouts.values():
                group = one.group_of(call)
                speakers[group].add(one.rank)
                sizes[group] = max(sizes[group], _ranks_in(call))
        alike = _numbered_alike(rank_logs) & speakers.keys()
        self.size = max([size, *(sizes[group] for group in alike)])
        self.members = {
            group: tuple(sorted(ranks)) for group, ranks in speakers.items() if group != DEFAULT_GROUP[0]
        } | self._of_all(alike, sizes, rank_logs)

    def _of_all(
        self, alike: Iterable[str], sizes: dict[str, int], rank_logs: Iterable[RankLog]
    ) -> dict[str, tuple[int, ...]]:
        """Groups that all ranks of the job are in."""
        if not self.size:
            return {}
        everybody = tuple(range(max([self.size, *(one.rank + 1 for one in rank_logs)])))
        whole = {group for group in alike if group == DEFAULT_GROUP[0] or sizes[group] == self.size}
        return dict.fromkeys(whole, everybody)


def _complete(rank_logs: Iterable[RankLog]) -> None:
    """Takes a rank's group from another rank that waits in the same collective."""
    known: dict[tuple[int, str], set[str]] = defaultdict(set)
    for one in rank_logs:
        for call in one.timeouts.values():
            if call.seq in one.at:
                known[(call.seq, call.op)].add(one.at[call.seq])
    for one in rank_logs:
        for call in one.timeouts.values():
            groups = known.get((call.seq, call.op), set())
            if len(groups) == 1:
                one.at.setdefault(call.seq, next(iter(groups)))


def _mix(rank_logs: Iterable[RankLog]) -> None:
    """A watchdog gives up one collective of its group: a rank that gave up several is in several groups.

    If none of these has a name, numbers of different ranks cannot be compared.
    """
    nameless = [
        {call.seq for call in one.timeouts.values() if call.seq and call.seq not in one.at} for one in rank_logs
    ]
    is_mixed = any(len(seqs) > 1 for seqs in nameless)
    for one in rank_logs:
        one.is_mixed = is_mixed
    unknown = {
        call.seq
        for one in rank_logs
        for call in one.timeouts.values()
        if one.group_of(call) == UNKNOWN_GROUP and call.seq
    }
    for one in rank_logs:
        one.is_apart = len(unknown) > 1


def _adopt(rank_logs: Iterable[RankLog]) -> None:
    """Takes the operation at a rank's number from the other ranks, if they agree.

    Otherwise the operation stays unknown.
    """
    known: dict[tuple[str, int], set[_Called]] = defaultdict(set)
    for one in rank_logs:
        for call in one.timeouts.values():
            known[(one.group_of(call), call.seq)].add((call.op, call.takes, call.gives))
    for one in rank_logs:
        theirs = {(one.group_of(call), call.seq) for call in one.timeouts.values()}
        for place in one.waits_at():
            if place not in theirs:
                calls = known.get(place, set())
                op, takes, gives = next(iter(calls)) if len(calls) == 1 else ("", None, None)
                one.add_timeout(TimedOut(place[1], op, takes, gives, 0, 0, None))
                one.at.setdefault(place[1], place[0])


def _numbered_alike(rank_logs: Iterable[RankLog]) -> set[str]:
    """Groups in which every known member has the same number as in the job."""
    alike: dict[str, bool] = defaultdict(lambda: True)
    for one in rank_logs:
        for name, standing in one.standings.items():
            alike[name] &= standing.rank == one.rank
        for call in one.timeouts.values():
            alike[one.group_of(call)] &= call.rank in (None, one.rank)
    return {name for name, same in alike.items() if same and not name.startswith(UNKNOWN_GROUP)}


def _ranks_in(call: TimedOut) -> int:
    """The number of ranks in a gather or reduce-scatter, by its sizes; 0 if unknown."""
    if call.op not in _SIZED or not call.takes or not call.gives or len(call.takes) != 1:
        return 0
    small, large = sorted((call.takes[0], call.gives))
    return min(large // small, MOST_RANKS) if small > 0 and large % small == 0 else 0


def lived_on(ranks: Collection[RankFacts]) -> Iterator[RankFacts]:
    """The facts; an exception that did not end a rank is moved to ``survived``."""
    if not any(facts.exception for facts in ranks):
        yield from ranks
        return
    waiting = Counter(place for facts in ranks for place in _places(facts))
    for facts in ranks:
        exception = facts.exception
        is_own = exception is not None and not exception.is_consequence
        if exception is not None and is_own and any(waiting[place] > 1 for place in _places(facts)):
            record = replace(facts.record or RecordFacts(), survived=_words(exception))
            yield replace(facts, exception=None, record=record)
        else:
            yield facts


def _places(facts: RankFacts) -> set[tuple[str, int, str]]:
    """Groups, numbers and operations in which the rank waits."""
    return {(call.group, call.seq, call.op) for call in facts.collectives if not call.completed and not call.is_p2p}


def _words(exception: ExceptionFacts) -> str:
    frame = deepest_user_frame(exception.stack)
    words = f"{exception.type}: {exception.message}" if exception.message else exception.type
    return words[:_LONGEST] + (f" at {short_location(frame)}" if frame else "")
