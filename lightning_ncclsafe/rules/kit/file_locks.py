"""Ranks that wait for a file lock, and who holds it, as far as ranks see it together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_ncclsafe.facts import FileLockFacts, LockHolder, RankFacts
from lightning_ncclsafe.facts.wording import duration_words
from lightning_ncclsafe.rules.kit.activity import Activity, hardly_runs
from lightning_ncclsafe.rules.kit.landmarks import Kind

_OLD_S = 60.0


@dataclass(frozen=True, slots=True)
class LockWait:
    """A rank that waits for a file lock.

    Attributes:
        rank: The rank.
        lock: The lock.
        holder: The rank that holds it, or that started the process which does; None if no rank does, or it is unknown.
        process: The process that holds it; None if it is the process of a rank, or unknown.
        is_inherited: Whether the rank's own process has taken it, and others have the file open as well.
    """

    rank: int
    lock: FileLockFacts
    holder: int | None = None
    process: LockHolder | None = None
    is_inherited: bool = False

    @property
    def is_for_peer(self) -> bool:
        """Whether another rank of the job has to release it."""
        return self.holder not in (None, self.rank)

    @property
    def holder_words(self) -> str:
        """``"rank 0 holds it"``, ``"process 708 (python other.py), which is no rank of this job, holds it"``."""
        if self.process is not None:
            return self._process_words(self.process)
        if self.holder == self.rank:
            return "its own process holds it already"
        if self.holder is not None:
            return f"rank {self.holder} holds it"
        if not self.lock.by_existence:
            return "who holds it is not shown here: it may be a process of another host or container"
        age_s = self.lock.age_s or 0.0
        age = f" for {duration_words(age_s)}" if age_s >= _OLD_S else ""
        return f"the file exists{age}, and no process that is shown here has it open: a dead one may have left it"

    def _process_words(self, process: LockHolder) -> str:
        command = f" ({process.command})" if process.command else ""
        if self.holder == self.rank:
            whose = f"its own process has taken it, and process {process.pid}{command} has the file open, too"
            return whose if self.is_inherited else f"process {process.pid}{command}, which it has started, holds it"
        by_whom = "is no rank of this job" if self.holder is None else f"rank {self.holder} has started"
        return f"process {process.pid}{command}, which {by_whom}, holds it"


def lock_waits(facts: Mapping[int, RankFacts]) -> dict[int, LockWait]:
    """Ranks that wait for a file lock; if that is not certain, only those whose lock another rank holds.

    Ranks that compute most of the time are left out: they take many locks, each for a moment.
    """
    pids = {(one.host, peer.pid): peer.rank for one in facts.values() for peer in one.peers if peer.rank >= 0}
    pids |= {(one.host, one.pid): one.rank for one in facts.values()}
    waits = (_wait(one, facts, pids) for one in facts.values() if one.file_lock is not None and hardly_runs(one))
    return {wait.rank: wait for wait in waits if wait.lock.is_certain or wait.is_for_peer}


def _wait(one: RankFacts, facts: Mapping[int, RankFacts], pids: Mapping[tuple[str, int], int]) -> LockWait:
    assert one.file_lock is not None
    lock = one.file_lock
    ranks = [pids.get((one.host, holder.pid)) for holder in lock.holders]
    own = next((rank for rank in ranks if rank is not None), None)
    others = [holder for holder, rank in zip(lock.holders, ranks, strict=True) if rank is None]
    if own is not None:
        is_inherited = own == one.rank and bool(others)
        return LockWait(one.rank, lock, own, others[0] if is_inherited else None, is_inherited)
    for holder in others:
        parents = (pids[one.host, pid] for pid in holder.parents if (one.host, pid) in pids)
        return LockWait(one.rank, lock, next(parents, None), holder)
    return LockWait(one.rank, lock, _holder_on_another_host(one, lock, facts))


def _holder_on_another_host(one: RankFacts, lock: FileLockFacts, facts: Mapping[int, RankFacts]) -> int | None:
    """The rank on another host that holds a lock on this path, if the file is on storage that both share."""
    if not lock.is_on_network:
        return None  # each host has a file of its own at this path
    others = (other.rank for other in facts.values() if other.host != one.host and lock.path in other.held_locks)
    return next(others, None)


def with_lock(doing: Activity, wait: LockWait | None) -> Activity:
    """A rank's activity, corrected by the file lock that it waits for."""
    if wait is None:
        return doing
    process = f"process {wait.process.pid} of " if wait.process is not None else ""
    held_by = f", which {process}rank {wait.holder} holds" if wait.is_for_peer else ""
    return replace(
        doing,
        kind=Kind.LOCK,
        call=f"line for the lock on {wait.lock.path}{held_by}",
        waits_alone=doing.waits_alone and not wait.is_for_peer,
        waits_for_holder=wait.is_for_peer,
    )
