"""The cause frozen-rank: a rank's process exists and does not answer."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import JobFacts, ProcessFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.rules.activity import deepest_user_frame
from lightning_ncclsafe.rules.hang.dead_rank import dead_rank
from lightning_ncclsafe.rules.hang.late_at_init import late_at_init
from lightning_ncclsafe.rules.hang.unreachable_host import unreachable_host
from lightning_ncclsafe.rules.sentences import place_words, severity, while_others_wait
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, location_of, ranks_words, verb

_STOPPED = "Send SIGCONT to process {pid} on its host, or let the debugger go on."
_DISK = "Look at the storage that process {pid} waits for on its host: a network mount that hangs, or heavy swapping."
_GIL = "Call the native code at that line so that it releases Python's global interpreter lock, or in another process."
_ALIVE = "Look at process {pid} on its host, e.g. with py-spy dump --native --pid {pid}."
_UNSEEN = "Look at this rank's host, at the network to it and at the rank's own output."


def frozen_rank(job: JobFacts) -> Iterable[Finding]:
    """A rank exists, as far as can be seen, and does not answer.

    Symptom:
        All other ranks wait; one prints nothing and answers nothing.

    Cause:
        The process is stopped (SIGSTOP, a debugger), in uninterruptible sleep (storage, swap), or native code holds
        Python's global interpreter lock.

    Remedy:
        By state: continue the process, repair the storage, release the lock in native code.

    Cannot see:
        A process on another host: whether the host, the network or the process does not answer.
    """
    view = timeline(job)
    if not view.facts and not view.witnesses:
        return
    known = (unreachable_host, dead_rank, late_at_init)
    explained = {rank for rule in known for finding in rule(job) for rank in finding.ranks}
    unseen = []
    for rank in view.silent:
        if rank in explained:
            continue
        if process := view.witnesses.get(rank):
            yield _seen(view, rank, process)
        else:
            unseen.append(rank)
    if unseen:
        yield _unseen(view, tuple(unseen))


def _state(process: ProcessFacts) -> tuple[str, str, Confidence]:
    """The state in words, what to do, and how sure it makes us."""
    frame = deepest_user_frame(process.stack)
    if process.state in ("stopped", "tracing-stop"):
        by = "stopped by a signal (SIGSTOP)" if process.state == "stopped" else "stopped by a debugger"
        return by, _STOPPED, Confidence.CERTAIN
    if process.state == "disk-sleep":
        where = f" in {process.wait_channel}" if process.wait_channel else ""
        return f"in uninterruptible sleep{where}", _DISK, Confidence.CERTAIN
    if process.gil_held:
        where = f" {place_words(frame)}" if frame else ""
        return f"running with Python's global interpreter lock held{where}", _GIL, Confidence.CERTAIN
    where = f", {place_words(frame)}" if frame else ""
    return f"{process.state or 'alive'}{where} and does not answer", _ALIVE, Confidence.LIKELY


def _seen(view: Timeline, rank: int, process: ProcessFacts) -> Finding:
    words, remedy, confidence = _state(process)
    observed = [f"Process {process.pid} is {process.state or 'alive'}"]
    observed += [f"kernel function {process.wait_channel}"] if process.wait_channel else []
    observed += [f"{process.cpu_s:.1f} s of processor time used"] if process.cpu_s is not None else []
    return Finding(
        rule="frozen-rank",
        severity=severity(view.job),
        confidence=confidence,
        summary=f"Rank {rank} is {words}{while_others_wait(view, (rank,))}.",
        ranks=(rank,),
        location=location_of(deepest_user_frame(process.stack)),
        evidence=(Evidence(source="process", rank=rank, text=", ".join(observed) + "."),),
        remedy=remedy.format(pid=process.pid),
    )


def _unseen(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    names = ranks_words(ranks)
    text = (
        f"{names} {verb(ranks, 'does', 'do')} not answer, and from here it cannot be told whether the host, the "
        f"network or the process is to blame{while_others_wait(view, ranks)}."
    )
    known = f"No facts came from {names} within the deadline, and no rank on the same host answered for it."
    return Finding(
        rule="frozen-rank",
        severity=severity(view.job),
        confidence=Confidence.POSSIBLE,
        summary=capitalised(text),
        ranks=ranks,
        evidence=(Evidence(source="process", text=known), *_reached(view, ranks)),
        remedy=_UNSEEN,
    )


def _reached(view: Timeline, ranks: tuple[int, ...]) -> Iterable[Evidence]:
    for host in view.job.silent_hosts:
        if host.answers and not {*host.ranks}.isdisjoint(ranks):
            text = f"From {host.seen_from}, {host.host} was tried at {host.address}: {host.tried}."
            yield Evidence(source="network", text=f"{text} It is the processes there that do not answer.")
