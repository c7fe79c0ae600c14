"""The cause dead-rank: a rank's process no longer exists."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from lightning_ncclsafe.facts import Frame, Phase, RankFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Findings,
    Plan,
    Severity,
    Timeline,
    aborted,
    alone_in_trainer,
    broken_off,
    broken_off_alone,
    capitalised,
    deepest_user_frame,
    finding,
    hang_rule,
    has_given_up,
    is_gone,
    left_in_order,
    location_of,
    overrun_of,
    past_aborted,
    place_words,
    ranks_words,
    signal_of,
    trainer_start,
    verb,
    while_others_wait,
)

# That of timeout(1), with which the guard ends processes, too.
_ENDED_BY_US = 124
_GONE = "is gone; how it ended is not known here, but its launcher may report it"
_REMEDY = "Look at the end of this rank's own output, at its launcher's messages and at the kernel's log (dmesg)."
_REMEDY_EXITED = (
    "Look at the end of this rank's own output, and for os._exit in the code and its libraries: an exception "
    "or sys.exit would have been reported."
)
_REMEDY_DONE = (
    "It ended as if it were done: its script finished, or it called sys.exit between two calls of the Trainer, or "
    "os._exit(0). Make the same calls of the Trainer on all ranks."
)
_REMEDY_KILLED = (
    "SIGKILL comes from outside. The kernel's log (dmesg) names the process if the out-of-memory killer sent it; "
    "otherwise look at the scheduler, the launcher, or whoever else can kill processes there."
)
_REMEDY_ENDED = (
    "Find out what ends processes there: a scheduler whose time limit is reached, a launcher, a kill command."
)
_REMEDY_FAULT = (
    "This is a bug in native code, in a library or an extension. Look at the end of this rank's own output, and at the "
    "line that it was in; PYTHONFAULTHANDLER=1 prints it."
)
_FAULTS = {
    "SIGSEGV": "a segmentation fault",
    "SIGBUS": "a bus error",
    "SIGFPE": "an arithmetic error",
    "SIGILL": "an illegal instruction",
    "SIGABRT": "it aborted itself, as a failed assertion does",
}
_ENDS = ("SIGTERM", "SIGINT", "SIGHUP")
_REMEDY_GLOO = (
    ' "op.preamble.length <= op.nbytes" there means that gloo aborted a process that received more than it had room '
    "for: then ranks called different collectives or different sizes."
)
_REMEDY_OOM = (
    "Use less memory on the host: fewer loader workers, a smaller prefetch_factor, no full copy of the dataset in "
    "every rank; or raise the memory limit of the job."
)


def is_ended_by_gloo(finding: Finding, others: Findings) -> bool:
    """That a process is gone is no news where it is told what gloo has ended it for."""
    ends = others.likely(("mismatched-collective", "diverged-collectives"))
    return any(set(other.ranks) >= set(finding.ranks) for other in ends)


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``restart`` if something else killed or ended it; ``unknown`` for lack of memory, a crash or an exit."""
    signals = {signal_of(view, rank) if rank in view.witnesses else "" for rank in finding.ranks}
    is_from_outside = signals <= {"SIGKILL", *_ENDS} and not _oom_kills(view, finding.ranks)
    return Plan.RESTART if is_from_outside else Plan.UNKNOWN


@hang_rule(after="network-cut", superseded=is_ended_by_gloo, plan=_plan)
def dead_rank(view: Timeline) -> Iterator[Finding]:
    """A rank's process is gone and left no explanation.

    Symptom:
        "Connection closed by peer" on the other ranks, or they wait in a collective; one rank prints nothing more.

    Cause:
        The process was killed by the kernel's out-of-memory killer or a scheduler, crashed with a segmentation fault,
        or called os._exit.

    Remedy:
        Look at this rank's own output and at the kernel's log. Use less host memory if it was the out-of-memory killer.

    Cannot see:
        How a process ended that something other than a rank started and already waited for; who sent a signal;
        processes on hosts where no rank answered.
    """
    explained = _explained(view) | view.raised_outside.keys()
    seen = tuple(rank for rank in view.silent if is_gone(view, rank) and rank not in explained)
    # Whom gloo has ended in what another rank has left out is a consequence of that.
    if seen and past_aborted(view):
        seen = tuple(rank for rank in seen if rank not in aborted(view))
    if seen:
        # Where the others have finished, it may have done so before it ended.
        may_have_left = all(facts.progress.phase is Phase.FINISHED for facts in view.facts.values()) and view.facts
        # That it is gone is seen; that it has come to its end by itself, and not by what ranks have called, is not.
        may_be_gloos = any(map(partial(_has_aborted_on_gloo, view), seen)) or not {*seen}.isdisjoint(aborted(view))
        confidence = Confidence.LIKELY if may_be_gloos else Confidence.CERTAIN
        confidence = Confidence.POSSIBLE if may_have_left else confidence
        ends = {_end(view, rank) for rank in seen}
        end = ends.pop() if len(ends) == 1 else _End()
        yield _finding(view, seen, confidence, _words(end, many=False), _words(end, many=True), end)
    elif (presumed := _presumed(view)) and not alone_in_trainer(view):
        yield _finding(view, presumed, Confidence.LIKELY, "disappeared silently", "disappeared silently", _End())


def _explained(view: Timeline) -> set[int]:
    """Ranks that gloo has ended, where it is told why, and those that have come to their end without another rank."""
    told = broken_off_alone(view)
    if told is not None:
        return {*told.ended}
    if alone_in_trainer(view):
        return {rank for rank in view.silent if rank in view.witnesses and left_in_order(view.witnesses[rank])}
    ended = () if view.raised else aborted(view)
    if broken_off(view) or any(overrun_of(view, rank) for rank in ended):
        return {*ended}
    # What the others had called was not the same either.
    have_diverged = view.divergence is not None or view.lost_divergence is not None
    return {rank for rank in ended if have_diverged and signal_of(view, rank) == "SIGABRT"}


class _End(NamedTuple):
    """How a process has ended, as far as that is known."""

    signal: str = ""
    status: int | None = None


def _end(view: Timeline, rank: int) -> _End:
    signal = signal_of(view, rank)
    process = view.witnesses[rank]
    children = (child for facts in view.facts.values() for child in facts.machine.ended if child.pid == process.pid)
    status = process.exit_code if process.exit_code is not None else next((one.exit_code for one in children), None)
    return _End(signal, None if signal else status)


def _words(end: _End, *, many: bool) -> str:
    """``"was killed by SIGKILL (…)"``: what was seen, and of what is not known, what it may have been."""
    was, is_ = ("were", "are") if many else ("was", "is")
    if end.status is not None:
        by_us = ", as when the guard ends a stuck run" if end.status == _ENDED_BY_US else ""
        return f"{'have' if many else 'has'} exited with status {end.status}{by_us}"
    if end.signal == "SIGKILL":
        return f"{was} killed by SIGKILL (by the kernel's out-of-memory killer or someone else)"
    if end.signal:
        return f"{was} ended by {end.signal}" + (f" ({_FAULTS[end.signal]})" if end.signal in _FAULTS else "")
    return f"{is_} gone"


def _presumed(view: Timeline) -> tuple[int, ...]:
    """Silent, unseen, and the connections to it broke: a frozen or slow process would have kept them open."""
    unseen = tuple(rank for rank in view.silent if rank not in view.witnesses)
    if any(host.answers is False and not {*host.ranks}.isdisjoint(unseen) for host in view.job.silent_hosts):
        return ()
    # Who has waited long enough gives up, and closes its connections.
    given_up = any(map(has_given_up, view.facts.values()))
    broken = not given_up and any(map(_has_lost_a_peer, view.facts.values()))
    return unseen if len(unseen) == 1 and broken and not view.raised else ()


def _has_lost_a_peer(facts: RankFacts) -> bool:
    """A connection that could not be made, before anything was sent over it, is none that broke."""
    was_connected = facts.progress.phase is not Phase.INIT or bool(facts.collectives)
    return was_connected and facts.exception is not None and facts.exception.is_consequence


def _finding(view: Timeline, ranks: tuple[int, ...], confidence: Confidence, one: str, many: str, end: _End) -> Finding:
    # One that has ended in another way was not killed for its memory.
    kills = _oom_kills(view, ranks) if end.status is None and end.signal in ("", "SIGKILL") else []
    killer = ", and the kernel's out-of-memory killer was active on its host" if kills else ""
    frame = _place(view, ranks)
    at = f" {place_words(frame)}" if frame else ""
    text = f"The process of {ranks_words(ranks)} {verb(ranks, one, many)}{at}{killer}{while_others_wait(view, ranks)}."
    return finding(
        view,
        ranks,
        capitalised(text) if len(ranks) == 1 else text.replace("The process of", "The processes of"),
        severity=Severity.ERROR,
        confidence=confidence,
        location=location_of(frame),
        evidence=(*_evidence(view, ranks), *kills),
        remedy=_REMEDY_OOM if kills else _remedy(end) + (_REMEDY_GLOO if _may_be_gloos(view, ranks, end) else ""),
    )


def _place(view: Timeline, ranks: tuple[int, ...]) -> Frame | None:
    """The line of the user's that they were in, as a fatal signal lets faulthandler say; None where it was not one."""
    stacks = [process.stack for rank in ranks if (process := view.witnesses.get(rank)) is not None]
    frames = {deepest_user_frame(stack[trainer_start(stack) :]) for stack in stacks}
    return frames.pop() if len(frames) == 1 else None


def _remedy(end: _End) -> str:
    if end.status is not None:
        return _REMEDY_EXITED if end.status else _REMEDY_DONE
    if end.signal in _ENDS:
        return _REMEDY_ENDED
    if end.signal in _FAULTS:
        return _REMEDY_FAULT
    return _REMEDY_KILLED if end.signal == "SIGKILL" else _REMEDY


def _evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterable[Evidence]:
    for rank in ranks[:8]:
        process = view.witnesses.get(rank)
        if process is not None:
            end = _end(view, rank)
            known = _words(end, many=False) if end.signal or end.status is not None else _GONE
            yield Evidence(source="process", rank=rank, text=f"Process {process.pid} {known}.")
            if process.said:
                yield Evidence(source="stderr", rank=rank, text=f"Last output on stderr: {process.said}")
        else:
            yield Evidence(
                source="exception", rank=rank, text="Did not answer, and its peers lost their connections to it."
            )


def _has_aborted_on_gloo(view: Timeline, rank: int) -> bool:
    return signal_of(view, rank) == "SIGABRT" and _is_on_gloo(view)


def _is_on_gloo(view: Timeline) -> bool:
    return any(call.backend == "gloo" for facts in view.facts.values() for call in facts.collectives[-1:])


def _may_be_gloos(view: Timeline, ranks: tuple[int, ...], end: _End) -> bool:
    """Whether gloo may have ended one of them: as far as is known it has ended itself, and the group is gloo's."""
    if end.status is not None:
        return False
    ended = any(rank in view.witnesses and signal_of(view, rank) in ("", "SIGABRT") for rank in ranks)
    return ended and _is_on_gloo(view)


def _oom_kills(view: Timeline, ranks: tuple[int, ...]) -> list[Evidence]:
    """The counter belongs to a host, so it speaks for a dead rank only where a neighbour on that host read it."""
    kills = []
    for facts in view.facts.values():
        count = facts.host_facts.oom_kills or 0
        if count and any(peer.rank in ranks for peer in facts.peers):
            ended = f"{count} {'process' if count == 1 else 'processes'}"
            text = f"The kernel's out-of-memory killer has ended {ended} on {facts.host or 'this host'}."
            kills.append(Evidence(source="host", rank=facts.rank, text=text))
    return kills[:1]
