"""The view that hang rules read: which ranks wait, work, are behind in a group or silent, and where calls diverged."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_ncclsafe.facts import (
    Collective,
    ExceptionFacts,
    Frame,
    Group,
    JobFacts,
    ProcessFacts,
    RankFacts,
    TrainerFacts,
)
from lightning_ncclsafe.facts.wording import numel
from lightning_ncclsafe.rules.kit.activity import Activity, activity, is_unrecorded, open_collectives, waits_in_init
from lightning_ncclsafe.rules.kit.exception_messages import with_consequence
from lightning_ncclsafe.rules.kit.file_locks import LockWait, lock_waits, with_lock
from lightning_ncclsafe.rules.kit.landmarks import Kind
from lightning_ncclsafe.rules.kit.parts import minority, ranks_by
from lightning_ncclsafe.rules.kit.rule import Rules, View, once, view_of

# Only the recorder's recent entries are compared: ranks that ran ahead have overwritten older ones.
_WINDOW = 256

# Inputs of these may differ between ranks by design.
_ASYMMETRIC = ("gather", "scatter", "send", "recv", "all_to_all", "alltoall", "_coalesced", "coalesced")
_EXCHANGES = ("all_to_all", "alltoall")
ROOTED = ("broadcast", "scatter", "gather", "reduce")
"""Operations that name one rank, by which they may complete on some ranks before others have begun."""

_SYMMETRIC = (
    *("all_gather", "allgather", "_all_gather", "_allgather", "reduce_scatter", "_reduce_scatter"),
    *("allreduce_coalesced", "all_reduce_coalesced"),
)

Signature = tuple[str, tuple[int, ...], tuple[str, ...]]


def signature(collective: Collective) -> Signature:
    """What must be equal on all ranks for a collective to complete: operation, numbers of elements and types."""
    op = collective.op
    if op.startswith(_EXCHANGES):
        # The sizes depend on how much a rank has for each of the others.
        return op, (), tuple(sorted(set(collective.dtypes)))
    return (op, _sizes(collective), collective.dtypes) if has_one_size(collective) else (op, (), ())


def _sizes(collective: Collective) -> tuple[int, ...]:
    """Number of elements of each tensor that a call coalesces; of all others together."""
    is_coalesced = collective.op.endswith("_coalesced")
    return tuple(map(math.prod, collective.input_sizes)) if is_coalesced else (numel(collective),)


def has_one_size(collective: Collective) -> bool:
    """Whether all ranks must pass the same number of elements to a collective."""
    op = collective.op
    return op.startswith(_SYMMETRIC) or not any(word in op for word in _ASYMMETRIC)


@dataclass(frozen=True, slots=True)
class GroupView:
    """One process group as its answering members see it.

    Attributes:
        name: Name of the group.
        members: Global ranks of the members, those that did not answer included.
        enqueued: Last sequence number that each answering member has called.
        oldest: Oldest outstanding sequence number of each answering member that has one.
    """

    name: str
    members: tuple[int, ...]
    enqueued: dict[int, int]
    oldest: dict[int, int]

    @property
    def seq(self) -> int | None:
        """The oldest outstanding sequence number; None if nothing is outstanding."""
        return min(self.oldest.values(), default=None)

    @property
    def behind(self) -> tuple[int, ...]:
        """Answering members that have not called what others wait in; not those that merely have called fewer."""
        seq = self.seq
        return () if seq is None else tuple(sorted(rank for rank, last in self.enqueued.items() if last < seq))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first sequence number of a group at which ranks called different collectives.

    Attributes:
        group: Name of the group.
        seq: Sequence number.
        calls: What each rank called.
    """

    group: str
    seq: int
    calls: dict[int, Collective]

    @property
    def variants(self) -> list[tuple[Collective, tuple[int, ...]]]:
        """The different calls, each with the ranks that made it, the most frequent first."""
        alike = ranks_by({rank: signature(call) for rank, call in sorted(self.calls.items())})
        return [(self.calls[ranks[0]], ranks) for ranks in sorted(alike.values(), key=lambda who: (-len(who), who))]

    @property
    def deviating(self) -> tuple[int, ...]:
        """The ranks that called something other than most did; all of them if no call was made by most."""
        return minority(ranks for _, ranks in self.variants) or tuple(sorted(self.calls))


class Timeline(View):
    """A job that waits: what each rank does and has called, and who waits for whom. Computed once, when first read."""

    def __init__(self, job: JobFacts) -> None:
        super().__init__(job)
        self.facts: dict[int, RankFacts] = {facts.rank: with_consequence(facts) for facts in job.ranks}
        self.silent: tuple[int, ...] = job.silent

    @cached_property
    def activities(self) -> dict[int, Activity]:
        """What each answering rank is doing."""
        without_locks = {rank: activity(facts) for rank, facts in self.facts.items()}
        return {rank: with_lock(doing, self.lock_waits.get(rank)) for rank, doing in without_locks.items()}

    @cached_property
    def lock_waits(self) -> dict[int, LockWait]:
        """The ranks that wait for a file lock, and who holds it."""
        return lock_waits(self.facts)

    @cached_property
    def trainers(self) -> dict[int, TrainerFacts]:
        """The Trainers of the answering ranks, as far as known."""
        return {rank: facts.trainer for rank, facts in self.facts.items() if facts.trainer is not None}

    @cached_property
    def witnesses(self) -> dict[int, ProcessFacts]:
        """Ranks' processes as other processes see them."""
        by_peers = (peer for facts in self.job.ranks for peer in facts.peers if peer.rank >= 0)
        seen: dict[int, ProcessFacts] = {}
        for process in (*by_peers, *self.job.witnessed):
            # Not every rank could read what a process wrote before it ended.
            if process.ended_by or process.rank not in seen or not seen[process.rank].ended_by:
                seen[process.rank] = process
        return seen

    @cached_property
    def groups(self) -> tuple[GroupView, ...]:
        """All process groups, by name."""
        seen: dict[str, dict[int, Group]] = defaultdict(dict)
        for rank, facts in self.facts.items():
            for group in facts.groups:
                seen[group.name][rank] = group
        oldest = self._oldest()
        return tuple(self._view(name, by_rank, oldest.get(name, {})) for name, by_rank in sorted(seen.items()))

    @cached_property
    def groups_by_name(self) -> dict[str, GroupView]:
        """The same by name."""
        return {group.name: group for group in self.groups}

    def _view(self, name: str, by_rank: dict[int, Group], oldest: dict[int, int]) -> GroupView:
        known = next((group.ranks for group in by_rank.values() if group.ranks), ())
        members = known or tuple(range(self.job.world_size))
        enqueued = {rank: group.last_enqueued for rank, group in by_rank.items()}
        for rank in members:
            is_unlisted = rank not in enqueued and rank in self.facts
            if is_unlisted and not self.waits(rank) and all(one.name != name for one in self.facts[rank].unrecorded):
                enqueued[rank] = 0
        for rank, group in by_rank.items():
            # The recorder's ring may have lost the entry, but not its counters.
            is_outstanding = group.last_enqueued > max(group.last_completed, 0)
            entries = (entry for entry in self.facts[rank].collectives if entry.group == name and not entry.is_p2p)
            if rank not in oldest and is_outstanding and not any(entries):
                oldest[rank] = max(group.last_completed, 0) + 1
        return GroupView(name, members, enqueued, oldest)

    def _oldest(self) -> dict[str, dict[int, int]]:
        oldest: dict[str, dict[int, int]] = defaultdict(dict)
        for rank, facts in self.facts.items():
            for entry in open_collectives(facts):
                oldest[entry.group].setdefault(rank, entry.seq)
        return oldest

    def waits(self, rank: int) -> bool:
        """Whether this rank waits for peers, or did until the transport reported that one is gone."""
        exception = self.facts[rank].exception
        if exception is not None:
            return exception.is_consequence
        return self.activities[rank].waits_for_peers

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Answering ranks that wait for peers, ascending."""
        return tuple(rank for rank in sorted(self.facts) if self.waits(rank))

    @cached_property
    def all_wait(self) -> bool:
        """Whether every rank has answered and waits for peers: none works, and none has raised by itself."""
        return len(self.waiting) == len(self.facts) and not self.silent

    @cached_property
    def each_waits_alone(self) -> bool:
        """Whether every rank has answered, none waits for peers or works, and some wait outside of their loaders."""
        doing = self.activities.values()
        all_wait = all(one.waits_alone or one.waits_for_data for one in doing) and any(one.waits_alone for one in doing)
        a_worker_runs = any(worker.state == "running" for facts in self.facts.values() for worker in facts.workers)
        return all_wait and not a_worker_runs and not self.silent and not self.raised

    @cached_property
    def awaits_joining(self) -> bool:
        """Whether a rank waits for others in ``init_process_group``."""
        return any(map(waits_in_init, self.facts.values()))

    @cached_property
    def raised(self) -> tuple[int, ...]:
        """Ranks with an exception of their own, ascending."""
        own = (rank for rank, facts in self.facts.items() if facts.exception and not facts.exception.is_consequence)
        return tuple(sorted(own))

    @cached_property
    def raised_outside(self) -> dict[int, ExceptionFacts]:
        """Exceptions that ended the programs of silent ranks, outside of the Trainer."""
        raised = {rank: process.raised for rank, process in self.witnesses.items() if rank in self.silent}
        return {rank: error for rank, error in raised.items() if error is not None and not error.is_consequence}

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """Ranks that are behind in some group, ascending."""
        return tuple(sorted({rank for group in self.groups for rank in group.behind}))

    @cached_property
    def stragglers(self) -> tuple[int, ...]:
        """Answering ranks that others wait for and that do not wait themselves, ascending."""
        behind = self._not_waiting(self.behind)
        if behind:
            return behind
        # Without a recorder, at the store or after a transport error, only the stacks show who is awaited.
        by_stacks = any(self.activities[rank].collective is None for rank in self.waiting)
        unrecorded = (rank for rank, facts in self.facts.items() if is_unrecorded(facts))
        return self._not_waiting(self.facts if by_stacks else unrecorded)

    def _not_waiting(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those that neither wait for peers nor raised, ascending."""
        return tuple(sorted(rank for rank in ranks if not self.waits(rank) and self.facts[rank].exception is None))

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """The stragglers that work while others wait: what they do delays the job."""
        return self.working(self.stragglers) if self.waiting else ()

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each rank, as far as the rank itself or another rank on that host has reported it."""
        by_peers = {peer.rank: facts.host for facts in self.job.ranks for peer in facts.peers}
        silent = {rank: host.host for host in self.job.silent_hosts for rank in host.ranks}
        own = {facts.rank: facts.host for facts in self.job.ranks}
        return {rank: host for rank, host in (by_peers | silent | own).items() if host}

    @cached_property
    def suspects(self) -> tuple[int, ...]:
        """The stragglers; if no rank waits for peers, all answering ranks, as each delays only itself."""
        return self.stragglers if self.waiting else self._not_waiting(self.facts)

    def working(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of these ranks that neither wait for peers, nor raised, nor have finished."""
        return tuple(rank for rank in self._not_waiting(ranks) if self.activities[rank].kind is not Kind.FINISHED)

    @cached_property
    def finished(self) -> tuple[int, ...]:
        """Answering ranks that are past the end of the Trainer, ascending."""
        return tuple(rank for rank, doing in sorted(self.activities.items()) if doing.kind is Kind.FINISHED)

    def besides(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks that have answered, without these, ascending."""
        return tuple(sorted(self.facts.keys() - {*ranks}))

    def waiting_besides(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks that wait, without these."""
        excluded = set(ranks)
        return tuple(rank for rank in self.waiting if rank not in excluded)

    @cached_property
    def divergence(self) -> Divergence | None:
        """The earliest difference between what ranks called under the same group and sequence number."""
        return self._first_divergence(group for group in self.groups if group.seq is not None)

    @cached_property
    def lost_divergence(self) -> Divergence | None:
        """The same in groups in which nothing is outstanding any more, because the connection to a member broke."""
        lost = (group for group in self.groups if group.seq is None and any(map(self._is_cut_off, group.enqueued)))
        return self._first_divergence(lost)

    @property
    def any_divergence(self) -> Divergence | None:
        """The earliest difference in groups in which something is outstanding, else in those of a broken connection."""
        return self.divergence or self.lost_divergence

    def _first_divergence(self, groups: Iterable[GroupView]) -> Divergence | None:
        splits = [split for group in groups if (split := self._diverged(group))]
        return min(splits, key=lambda split: min(call.created_ns for call in split.calls.values()), default=None)

    def _is_cut_off(self, rank: int) -> bool:
        exception = self.facts[rank].exception
        return exception is not None and exception.is_consequence

    def _diverged(self, group: GroupView) -> Divergence | None:
        calls = self._calls(group.name)
        for seq in sorted(calls):
            if len({signature(call) for call in calls[seq].values()}) > 1:
                return Divergence(group.name, seq, calls[seq])
        return None

    @once
    def _calls(self, name: str) -> dict[int, dict[int, Collective]]:
        """The recent calls in a group, by sequence number and rank."""
        group = self.groups_by_name[name]
        first = max((group.seq or 0) - _WINDOW, 0)
        calls: dict[int, dict[int, Collective]] = defaultdict(dict)
        for rank in self.facts.keys() & group.enqueued.keys():
            # Later entries were called in a destroyed group whose name this one has taken over; but the counters of
            # dumps and logs may be incomplete.
            last = math.inf if self.job.is_recorded else group.enqueued[rank]
            for entry in self.facts[rank].collectives:
                if first <= entry.seq <= last and entry.group == group.name and not entry.is_p2p:
                    calls[entry.seq][rank] = self.with_stack(entry)
        return calls

    def sequences(self, name: str) -> dict[int, list[Collective]]:
        """What each answering member has called in a group recently, in order, as far as no call is missing between."""
        by_rank: dict[int, list[Collective]] = defaultdict(list)
        for _, calls in sorted(self._calls(name).items() if name in self.groups_by_name else ()):
            for rank, call in calls.items():
                own = by_rank[rank]
                # Of very many outstanding calls, reports leave out those in the middle.
                if not own or own[-1].seq + 1 == call.seq:
                    own.append(call)
        return dict(by_rank)

    def with_stack(self, call: Collective) -> Collective:
        """The same collective with its stack, which is recorded only with the newest of several calls at one site."""
        return replace(call, stack=self._stacks.get(call.site, ())) if call.site and not call.stack else call

    @cached_property
    def _stacks(self) -> dict[str, tuple[Frame, ...]]:
        calls = (call for facts in self.facts.values() for call in facts.collectives if call.site and call.stack)
        return {call.site: call.stack for call in calls}

    def joined(self, group: GroupView) -> dict[int, Collective]:
        """What each member has called at the group's oldest outstanding number; empty unless all called the same."""
        if group.seq is None or len(group.enqueued) < len(group.members):
            return {}
        calls = self._calls(group.name).get(group.seq, {})
        same = len({signature(call) for call in calls.values()}) == 1
        return calls if same and len(calls) == len(group.members) else {}


def timeline(job: JobFacts) -> Timeline:
    """The view of this job; consecutive calls for one job return the same object."""
    return view_of(Timeline, job)


def stack_of(view: Timeline, rank: int) -> tuple[Frame, ...]:
    """A rank's stack, or that of its exception, or the last one of its process if that is gone; may be empty."""
    if rank not in view.facts:
        return view.witnesses[rank].stack if rank in view.witnesses else ()
    return view.facts[rank].last_stack


WHY_RANKS_WAIT = Rules(Timeline)
WHAT_WAS_RECORDED = Rules(Timeline)

hang_rule = WHY_RANKS_WAIT.rule
recorded_rule = WHAT_WAS_RECORDED.rule
