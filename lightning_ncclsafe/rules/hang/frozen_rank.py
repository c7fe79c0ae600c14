"""The cause frozen-rank: a rank does not answer, and nothing shows why."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.rules.hang.dead_rank import dead_rank
from lightning_ncclsafe.rules.hang.late_at_init import late_at_init
from lightning_ncclsafe.rules.hang.unreachable_host import unreachable_host
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Reason,
    Timeline,
    alone_in_trainer,
    capitalised,
    deepest_user_frame,
    finding,
    hang_rule,
    named_by,
    place_words,
    ranks_words,
    silent_finding,
    silent_processes,
    tried_words,
    verb,
    while_others_wait,
)

_ALIVE = "Look at process {pid} on its host, e.g. with py-spy dump --native --pid {pid}."
_UNSEEN = "Look at this rank's host, at the network to it and at the rank's own output."


# Ranks outside of the Trainer have no guard that would answer.
@hang_rule(after="wrong-interface", unless=(alone_in_trainer,))
def frozen_rank(view: Timeline) -> Iterator[Finding]:
    """A rank seems to exist but does not answer, and nothing shows why.

    Symptom:
        All other ranks wait; one prints nothing and does not answer.

    Cause:
        The process is alive, and no known reason applies: it is not stopped (stopped-process), not blocked on storage
        (blocked-on-disk), does not hold the interpreter's lock (gil-held) and gets time on a core (host-starved). Or it
        is on a host where no rank answers, and it is unknown whether the host, the network or the process is to blame.

    Remedy:
        Inspect the process on its host, for instance with py-spy.

    Cannot see:
        A process on another host.
    """
    if not view.facts and not view.witnesses:
        return
    for rank, process in silent_processes(view, Reason.UNKNOWN):
        yield silent_finding(view, rank, process, _words(process), remedy=_ALIVE.format(pid=process.pid))
    explained = named_by(view, unreachable_host, dead_rank, late_at_init)
    unseen = tuple(rank for rank in view.silent if rank not in explained and rank not in view.witnesses)
    if unseen:
        yield _unseen(view, unseen)


def _words(process: ProcessFacts) -> str:
    frame = deepest_user_frame(process.stack)
    where = f", {place_words(frame)}" if frame else ""
    return f"{process.state or 'alive'}{where} and does not answer"


def _unseen(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    names = ranks_words(ranks)
    text = (
        f"{names} {verb(ranks, 'does', 'do')} not answer; from here it is unknown whether the host, the "
        f"network or the process is to blame{while_others_wait(view, ranks)}."
    )
    known = f"{capitalised(names)} sent no facts within the deadline, and no rank on the same host answered."
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.POSSIBLE,
        evidence=(Evidence(source="process", text=known), *_host_evidence(view, ranks)),
        remedy=_UNSEEN,
        location="",
    )


def _host_evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterable[Evidence]:
    """The hosts of these ranks that answer on the network."""
    for host in view.job.silent_hosts:
        if host.answers and not {*host.ranks}.isdisjoint(ranks):
            yield Evidence(source="network", text=f"{tried_words(host)} The processes there do not answer.")
