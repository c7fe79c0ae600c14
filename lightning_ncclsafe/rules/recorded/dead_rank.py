"""The cause dead-rank, in a log: a launcher reports that a signal ended a rank's process."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.rules.hang.dead_rank import is_ended_by_gloo
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Timeline,
    capitalised,
    clause,
    finding,
    ranks_by,
    ranks_words,
    recorded_rule,
)
from lightning_ncclsafe.rules.recorded.kit.calls import record_of
from lightning_ncclsafe.rules.recorded.kit.ends import (
    FATAL,
    a_timeout_expired,
    died,
    failed,
    fatal_signal,
    fatal_signal_of,
    lost_at_init,
    raised,
)
from lightning_ncclsafe.rules.recorded.kit.evidence import finished_evidence, waited_words, waiting_in, waiting_words
from lightning_ncclsafe.rules.recorded.kit.statements import LogStatements, compared, stated

_REMEDY = "Look at the kernel's log (dmesg) of its host and at the end of its own output."
_REMEDY_FINISHED = (
    "This rank has made all its steps. If the others still train, give all ranks equally many batches (a sampler or a "
    "stream that is split evenly, drop_last), the same settings of the Trainer and the same state to resume from."
)
_REMEDY_ENDED = (
    "If it has finished without an error, it had fewer steps than the others, or it alone was asked to stop. "
    "Otherwise something has ended it."
)
# Who reports that the kernel, or a monitor, has ended a process because memory ran out.
_OF_MEMORY = ("SLURM", "Kubernetes", "the kernel's log", "Ray's memory monitor")
_REMEDIES = {
    -9: (
        "If the kernel's log (dmesg) of its host names the out-of-memory killer, use less memory on the host: fewer "
        "loader workers, a smaller prefetch_factor, no full copy of the dataset in every rank; or give the job more."
    ),
    -7: (
        "If /dev/shm was full, give the job more shared memory (docker run --shm-size, an emptyDir of medium Memory), "
        "or use fewer workers; otherwise look at the kernel's log (dmesg) of its host."
    ),
}


@recorded_rule(after="failed-rank", remedy=_REMEDY, superseded=is_ended_by_gloo)
def dead_rank(view: Timeline) -> Iterator[Finding]:
    """A signal has ended a rank's process, other than the watchdog's own abort; or it is gone while others wait.

    Symptom:
        "exitcode: -9", "Signal 11 (SIGSEGV)", "task 3: Out Of Memory", "exits with return code = -9" at the end of the
        log; the others time out, or report "Connection closed by peer".

    Cause:
        The out-of-memory killer, a scheduler, a segmentation fault, a full /dev/shm; or it has finished while the
        others have not.

    Remedy:
        Look at the kernel's log of that host. Use less host memory if it was the out-of-memory killer.

    Cannot see:
        Who sent a SIGKILL: launchers also send one to a process that does not end after SIGTERM. Which rank it was, if
        the launcher names no process, or only the command of the one that it started last.
    """
    alike = ranks_by({rank: fatal_signal_of(view, rank) for rank in died(view)})
    if raised(view):
        # Processes that were ended later were ended because of that.
        return
    for code, ranks in alike.items():
        yield _finding(view, code, ranks)
    if not failed(view):
        yield from _nameless(view) if _killed(view) else _lost(view)


def _killed(view: Timeline) -> LogStatements:
    """Ends of processes of unknown ranks, except by an exception or an abort.

    A process whose watchdog is stuck is ended by PyTorch: that may be the one that has ended in an unknown way. If all
    ranks have given up before, a process may end in any way, but memory runs out for a reason of its own.
    """
    records = [*map(record_of, view.facts.values())]
    all_gave_up = view.job.is_sized and sum(bool(one.waited_ms) for one in records) == view.job.world_size
    ends = [one for one in stated(view, StatementKind.ENDED) if not all_gave_up or one.detail in _OF_MEMORY]
    is_stuck = any(one.stuck_s for one in records)
    return LogStatements(
        one for one in ends if fatal_signal(one.exit_code) or (one.exit_code is None and (one.ranks or not is_stuck))
    )


def _nameless(view: Timeline) -> Iterator[Finding]:
    found = _killed(view)
    codes = [code for one in found if (code := fatal_signal(one.exit_code))]
    how = FATAL[codes[0]] if codes else ""
    local = next((one.local_rank for one in found if one.local_rank is not None), None)
    which = f"process {local} of a host" if local is not None else "a process"
    detail = next(iter(found.details), "")
    what = f"{detail or 'a launcher'} says that {which} was {how}" if codes else detail or f"{which} is dead"
    ranks = found.ranks if _are_named(found) else ()
    text = f"{what}{'' if ranks else '; the log does not say which rank that is'}{waited_words(view)}"
    yield finding(
        view,
        ranks,
        f"{text}.",
        confidence=Confidence.LIKELY if codes else Confidence.POSSIBLE,
        evidence=found.evidence,
        remedy=_REMEDIES.get(codes[0], _REMEDY) if codes else _REMEDY,
    )


def _are_named(found: LogStatements) -> bool:
    """Whether the ranks of all are known; Ray may report one death twice, once with the rank."""
    nameless = [one for one in found if not one.ranks]
    is_repeated = len(nameless) < len(found) == 2 and all(one.detail.startswith("Ray") for one in found)
    return not nameless or is_repeated


def _lost(view: Timeline) -> Iterator[Finding]:
    """A connection was closed by its other end: by the process there, or by the kernel if that process is dead."""
    found = stated(view, StatementKind.PEER_LOST)
    if lost_at_init(view):
        return
    if not found or a_timeout_expired(view) or compared(view) or stated(view, StatementKind.UNREACHABLE):
        return
    if (rank := _unheard(view, found)) is not None:
        yield _gone(view, found, rank)
        return
    who = f" on {ranks_words(found.by)}" if found.by else ""
    text = (
        f"a connection was closed by its other end{who}: the process there ended, was killed, or failed, and the "
        "log does not say which rank that was"
    )
    yield finding(
        view,
        (),
        f"{text}.",
        confidence=Confidence.POSSIBLE,
        evidence=found.evidence,
        remedy="Read the logs of all ranks and of all hosts: the first one that ended says why. " + _REMEDY,
    )


def _unheard(view: Timeline, found: LogStatements) -> int | None:
    """The only rank without a dump or a line, if all others have lost a connection or wait; None if unknown."""
    if not (view.job.is_sized and view.waiting) or stated(view, StatementKind.ENDED):
        return None
    heard = {*view.facts, *found.by, *view.job.log.lost_store, *view.job.outdated, *view.job.left_out}
    others = [rank for rank in range(view.job.world_size) if rank not in heard]
    return others[0] if len(others) == 1 else None


def _gone(view: Timeline, found: LogStatements, rank: int) -> Finding:
    waiting = {
        other: call for group in view.groups if group.seq is not None for other, call in waiting_in(view, group).items()
    }
    finished = view.job.log.finished if rank == 0 else ""
    after = f" after its Trainer had stopped ({finished})" if finished else ""
    while_ = f", while {waiting_words(waiting)}" if waiting else ""
    why = "a connection was closed, and this rank alone has left neither a dump nor a line about it"
    lost = view.job.log.lost_store
    store = f"{ranks_words(lost)} can no longer reach the store, which rank 0 or the launcher keeps"
    return finding(
        view,
        (rank,),
        f"The process of rank {rank} has ended{after}{while_}: {why}.",
        evidence=(
            *found.evidence,
            *((Evidence(source="log", text=f"{capitalised(store)}."),) if lost and rank == 0 else ()),
            *finished_evidence(view, (rank,)),
        ),
        remedy=_REMEDY_FINISHED if finished else f"{_REMEDY_ENDED} {_REMEDY}",
    )


def _finding(view: Timeline, code: int, ranks: tuple[int, ...]) -> Finding:
    return finding(
        view,
        ranks,
        f"{clause(ranks, 'was|were')} {FATAL[code]}{waited_words(view, ranks)}.",
        confidence=Confidence.LIKELY if len(ranks) == 1 else Confidence.POSSIBLE,
        evidence=tuple(
            Evidence(source="log", rank=rank, text=f"Its launcher reports exit code {code}.") for rank in ranks[:LISTED]
        ),
        remedy=_REMEDIES.get(code, _REMEDY),
    )
