"""The cause dead-rank: a rank's process no longer exists."""

from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import CTYPES
from lightning_ncclsafe.facts import Frame, LastSeen, Phase, ProcessFacts, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    REMEDY_MAPPED_FILE,
    Confidence,
    Evidence,
    ExitCalls,
    Finding,
    Findings,
    Plan,
    Severity,
    Timeline,
    aborted_by_gloo,
    aborted_elsewhere,
    aborted_model_run,
    alone_in_trainer,
    at_words,
    batch_words,
    below_user,
    continued_before_abort,
    deepest_user_frame,
    exit_calls,
    finding,
    hang_rule,
    has_given_up,
    hook_words,
    innermost_action,
    inside_trainer,
    is_gone,
    is_on_gloo,
    left_in_order,
    location_of,
    overrun_bytes,
    place_words,
    ranks_words,
    short_of_memory,
    short_place,
    signal_of,
    status_of,
    verb,
    while_others_wait,
)

# The status of timeout(1), with which the guard also ends processes.
_ENDED_BY_GUARD = 124
# A rank that had made no progress for this long has not got far since it was last seen, a quarter of a second ago.
_STAYED_S = 1.0
# A rank that is gone may have been this many batches behind those that wait for it.
_BATCHES_BEHIND = 1
_GONE = "is gone; how it ended is not known here, but its launcher may report it"
_REMEDY = "Look at the end of this rank's own output, at its launcher's messages and at the kernel's log (dmesg)."
_REMEDY_EXITED = (
    "Look at the end of this rank's own output, and for os._exit in the code and its libraries: an exception "
    "or sys.exit would have been reported."
)
_REMEDY_CALL = (
    "Look at what leads to the line {place}: a rank that ends there leaves the others waiting. Let all ranks end at "
    "the same batch, or raise an exception, which is reported. If it did not end there, a library has ended it."
)
_REMEDY_LINES = "It may have ended by {calls}: look first at what leads there. "
_REMEDY_DONE = (
    "It ended as if it had finished: its script ended, or it called sys.exit between two calls of the Trainer, or "
    "os._exit(0). Make the same calls of the Trainer on all ranks."
)
# If memory is scarce, and if nothing speaks for that.
_REMEDY_KILLED_FOR_MEMORY = (
    "SIGKILL comes from outside. The kernel's log (dmesg) names the process if the out-of-memory killer sent it; "
    "otherwise look at the scheduler, the launcher, or anything else that can kill processes there, and at the limit "
    "of the process's CPU time (RLIMIT_CPU, ulimit -t)."
)
_REMEDY_KILLED = (
    "SIGKILL comes from outside. Look at the scheduler, the launcher, or anything else that can kill processes there. "
    "The kernel sends it, too: to a process that has used up its CPU time (RLIMIT_CPU, ulimit -t), or as memory ran "
    "out, and then its log (dmesg) names the process."
)
_REMEDY_CPU_TIME = (
    "The process had used up its CPU time: find out what limits it (RLIMIT_CPU: ulimit -t in the job's shell, "
    "resource.setrlimit in the code, the scheduler), and raise or remove that limit."
)
_REMEDY_ITSELF = "Its own code may have sent the signal: look first at what leads to {calls}. If it did not: "
_REMEDY_OR_ITSELF = " Its own code may also have sent the signal, if it came to {calls}."
_REMEDY_ENDED = (
    "Find out what ends processes there: a scheduler whose time limit is reached, a launcher, a kill command."
)
_REMEDY_FAULT = (
    "This is a bug in native code, in a library or an extension. Look at the end of this rank's own output, and at the "
    "line that it was in{how}."
)
_REMEDY_ADDRESS = (
    "Native code was given an address, a size or an array that it cannot use, or has a bug of its own: check what that "
    "line passes to it (a pointer, offset or length for ctypes, a mapped file that is shorter than expected or closed, "
    "an index or a shape that is out of range). Look also at the end of this rank's own output."
)
_REMEDY_BUS = f"{REMEDY_MAPPED_FILE} Look at the line that the rank was in; PYTHONFAULTHANDLER=1 prints it."
_FAULTS = {
    "SIGSEGV": "a segmentation fault",
    "SIGBUS": "a bus error",
    "SIGFPE": "an arithmetic error",
    "SIGILL": "an illegal instruction",
    "SIGABRT": "it aborted itself, as a failed assertion does",
}
# How gloo ends a process that receives what it has no room for, and what may happen first in another of its threads.
_NATIVE = ("SIGABRT", "SIGSEGV")
_ENDS = ("SIGTERM", "SIGINT", "SIGHUP")
_REMEDIES = {"SIGBUS": _REMEDY_BUS, "SIGXCPU": _REMEDY_CPU_TIME, **dict.fromkeys(_ENDS, _REMEDY_ENDED)}
# The statuses of a program that has come to its end, and of one that has raised.
_COMMON = (0, 1)
_NO_CALLS = ExitCalls(None, ())
_OVERRUN = "op.preamble.length <= op.nbytes"
_REMEDY_GLOO = (
    f' "{_OVERRUN}" there means that gloo aborted a process that received more data than its call '
    "had room for: ranks called different collectives, or one with different sizes."
)
_REMEDY_OOM = (
    "Use less memory on the host: fewer loader workers, a smaller prefetch_factor, no full copy of the dataset in "
    "every rank; or raise the memory limit of the job."
)


def is_ended_by_gloo(finding: Finding, others: Findings) -> bool:
    """Whether another finding explains why gloo ended these processes."""
    causes = others.likely(("mismatched-collective", "diverged-collectives"))
    return any(set(other.ranks) >= set(finding.ranks) for other in causes)


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
        How a process ended if its parent is no rank and has already collected its status, before Linux 6.15; which of
        several calls in the code exited with the same status, or whether a library did; who sent a signal; processes
        on hosts where no rank answered.
    """
    explained = _explained(view) | view.raised_outside.keys()
    gone = tuple(rank for rank in view.silent if is_gone(view, rank) and rank not in explained)
    # An abort by gloo in a call that another rank has skipped is a consequence of the skip.
    if gone and continued_before_abort(view):
        gone = tuple(rank for rank in gone if rank not in aborted_by_gloo(view))
    if gone:
        ends = {_end(view, rank) for rank in gone}
        end = ends.pop() if len(ends) == 1 else _End()
        calls = _exit_calls(view, gone, end)
        one, many = _words(end, calls, many=False), _words(end, calls, many=True)
        yield _finding(view, gone, _confidence(view, gone, calls), one, many, end, calls)
    elif (presumed := _presumed(view)) and not alone_in_trainer(view):
        yield _finding(
            view, presumed, Confidence.LIKELY, "has probably ended", "have probably ended", _End(), _NO_CALLS
        )


def _confidence(view: Timeline, gone: tuple[int, ...], calls: ExitCalls) -> Confidence:
    """That they are gone is certain; what has ended them may not be: gloo, for what ranks called, or a library."""
    may_be_gloo = not {*gone}.isdisjoint(aborted_by_gloo(view))
    may_be_gloo = may_be_gloo or any(_may_have_crashed_on_gloo(view, rank) for rank in gone)
    # If the others' calls differ, it may have been sent what it had not waited for.
    is_doubtful = may_be_gloo and view.any_divergence is not None
    # If the others have finished, it may have finished before it ended.
    may_have_left = {facts.progress.phase for facts in view.facts.values()} == {Phase.FINISHED}
    if may_have_left or is_doubtful:
        return Confidence.POSSIBLE
    return Confidence.LIKELY if may_be_gloo or calls.only is not None else Confidence.CERTAIN


def _explained(view: Timeline) -> set[int]:
    """Gone ranks that other rules explain: those that gloo aborted, and those that exited normally."""
    model_run = aborted_model_run(view)
    if model_run is not None:
        return {*model_run.ended}
    if alone_in_trainer(view):
        return {rank for rank in view.silent if rank in view.witnesses and left_in_order(view.witnesses[rank])}
    ended = () if view.raised else aborted_by_gloo(view)
    if aborted_elsewhere(view) or any(overrun_bytes(view, rank) for rank in ended):
        return {*ended}
    # The calls of the others were different, too.
    return {rank for rank in ended if view.any_divergence and signal_of(view, rank) == "SIGABRT"}


class _End(NamedTuple):
    """How a process ended, as far as known."""

    signal: str = ""
    status: int | None = None


def _end(view: Timeline, rank: int) -> _End:
    signal = signal_of(view, rank)
    return _End(signal, None if signal else status_of(view, rank))


def _exit_calls(view: Timeline, gone: tuple[int, ...], end: _End) -> ExitCalls:
    """The statements that may have ended them, if the guard has not."""
    seen = [view.witnesses[rank].last_seen for rank in gone]
    idle_s = max((one.progress.idle_s for one in seen if one is not None), default=0.0)
    if end.status == _ENDED_BY_GUARD and idle_s >= view.job.incident.shortest_timeout_s:
        return _NO_CALLS
    is_outside = None in seen
    calls = exit_calls(view, status=end.status, signal=end.signal, may_raise=is_outside)
    # Outside of the Trainer, the program may also have come to its end, or have raised.
    return calls._replace(only=None) if is_outside and end.status in _COMMON else calls


def _words(end: _End, calls: ExitCalls, *, many: bool) -> str:
    """``"was killed by SIGKILL (…)"``: how it ended, and possible reasons if these are unknown."""
    was, is_ = ("were", "are") if many else ("was", "is")
    if end.status is not None:
        is_by_guard = end.status == _ENDED_BY_GUARD and calls.only is None
        by_guard = ", as when the guard ends a stuck run" if is_by_guard else ""
        return f"{'have' if many else 'has'} exited with status {end.status}{by_guard}"
    if end.signal == "SIGKILL":
        others = "someone else, or its own code" if calls.possible else "or someone else"
        comma = "," if calls.possible else ""
        return f"{was} killed by SIGKILL (by the kernel's out-of-memory killer{comma} {others})"
    if end.signal:
        return f"{was} ended by {end.signal}" + (f" ({_FAULTS[end.signal]})" if end.signal in _FAULTS else "")
    return f"{is_} gone"


def _presumed(view: Timeline) -> tuple[int, ...]:
    """The only silent rank that nobody sees, if connections to it broke: a frozen process would have kept them open."""
    unseen = tuple(rank for rank in view.silent if rank not in view.witnesses)
    if any(host.answers is False and not {*host.ranks}.isdisjoint(unseen) for host in view.job.silent_hosts):
        return ()
    # A rank whose timeout expires closes its connections.
    given_up = any(map(has_given_up, view.facts.values()))
    broken = not given_up and any(map(_has_lost_a_peer, view.facts.values()))
    return unseen if len(unseen) == 1 and broken and not view.raised else ()


def _has_lost_a_peer(facts: RankFacts) -> bool:
    """Whether a rank lost a connection, and did not merely fail to connect at the start."""
    was_connected = facts.progress.phase is not Phase.INIT or bool(facts.collectives)
    return was_connected and facts.exception is not None and facts.exception.is_consequence


def _finding(
    view: Timeline,
    ranks: tuple[int, ...],
    confidence: Confidence,
    one: str,
    many: str,
    end: _End,
    calls: ExitCalls,
) -> Finding:
    # A process that ended differently was not killed for its memory.
    kills = _oom_kills(view, ranks) if end.status is None and end.signal in ("", "SIGKILL") else []
    killer = ", and the kernel's out-of-memory killer was active on its host" if kills else ""
    frame = _place(view, ranks)
    at = at_words(frame)
    process = view.witnesses.get(ranks[0]) if len(ranks) == 1 else None
    seen = _seen(view, process) if process is not None else None
    if seen is not None and frame is None:
        frame = _stayed_in(seen)
        at = f", last seen {_seen_words(seen)}"
    elif seen is not None:
        # It may have begun another batch since then.
        at += f", last seen {_batch_seen_words(seen)}"
    waits = while_others_wait(view, ranks)
    if frame is not None and seen is None and waits:
        # It has got further than it was seen, and is not ahead of those that wait for it.
        waits += _batch_of_others(view)
    if calls.only is not None:
        at = f", as after {calls.words}{at}"
    whose = f"{verb(ranks, 'the process', 'the processes')} of {ranks_words(ranks)}"
    return finding(
        view,
        ranks,
        f"{whose} {verb(ranks, one, many)}{at}{killer}{waits}.",
        severity=Severity.ERROR,
        confidence=confidence,
        location=calls.location or location_of(frame),
        evidence=(*_evidence(view, ranks, calls), *kills, *calls.evidence(ranks[0])),
        remedy=_REMEDY_OOM
        if kills
        else _remedy(end, calls, _of_signal(view, ranks, end, frame), was_there=_was_there(view, ranks, calls))
        + (_REMEDY_GLOO if _may_be_aborted_by_gloo(view, ranks, end) else ""),
    )


def _place(view: Timeline, ranks: tuple[int, ...]) -> Frame | None:
    """The one user line that they were at, which faulthandler writes on a fatal signal; else None."""
    stacks = [process.stack for rank in ranks if (process := view.witnesses.get(rank)) is not None]
    frames = {deepest_user_frame(inside_trainer(stack)) for stack in stacks}
    return frames.pop() if len(frames) == 1 else None


def _seen(view: Timeline, process: ProcessFacts) -> LastSeen | None:
    """Where it was last seen; None if that is unknown, or it had got further by then, as quick batches go by unseen.

    A rank on gloo that waits for it in a batch has not left the one before without it.
    """
    seen = process.last_seen
    if seen is None or seen.progress.idle_s >= _STAYED_S or not is_on_gloo(view):
        return seen
    then, now = seen.progress, [facts.progress for facts in view.facts.values()]
    if {then.phase, *(one.phase for one in now)} != {Phase.TRAIN}:
        return seen
    first = min(now, key=lambda one: (one.epoch, one.batch_idx))
    # The last batch of an epoch is followed by the first one of the next.
    begun = first.batch_idx if first.epoch == then.epoch else first.batch_idx + 1
    before = then.batch_idx if first.epoch == then.epoch else 0
    is_past = first.epoch >= then.epoch and begun - before > _BATCHES_BEHIND
    return None if is_past else seen


def _stayed_in(seen: LastSeen) -> Frame | None:
    """The user's innermost line that the rank had been at, or below, for a second; None if it had moved on."""
    return deepest_user_frame(seen.stack[: seen.stayed]) if seen.progress.idle_s >= _STAYED_S else None


def _seen_words(seen: LastSeen) -> str:
    """``"in Net.on_train_epoch_end at train.py:42 in evaluate, batch 3 of epoch 0"``."""
    action = innermost_action(seen.progress)
    where = (f"in {hook_words(action.name)}" if action else "", place_words(_stayed_in(seen)))
    place = " ".join(filter(None, where))
    return f"{place}, {batch_words(seen.progress)}" if place else _batch_seen_words(seen)


def _batch_of_others(view: Timeline) -> str:
    """``", in batch 44 of epoch 2"``, in which all others are; empty if they are not in one."""
    batches = {batch_words(facts.progress) for facts in view.facts.values()}
    batch = batches.pop() if len(batches) == 1 else ""
    return f", in {batch}" if batch.startswith("batch ") else ""


def _batch_seen_words(seen: LastSeen) -> str:
    batch = batch_words(seen.progress)
    return f"in {batch}" if batch.startswith("batch ") else batch


def _was_there(view: Timeline, ranks: tuple[int, ...], calls: ExitCalls) -> bool:
    """Whether one of them was last seen in a function with one of these calls."""
    seen = [one.last_seen for rank in ranks if (one := view.witnesses.get(rank)) is not None]
    frames = [frame for one in seen if one is not None for frame in one.stack if frame.user]
    functions = {(PurePath(frame.file).name, frame.function) for frame in frames}
    places = (call.place.rpartition(":") for call in calls.possible)
    return any((PurePath(file).name, rest.partition(" in ")[2]) in functions for file, _, rest in places)


def _remedy(end: _End, calls: ExitCalls, of_signal: str, *, was_there: bool) -> str:
    if calls.timer_remedy:
        return calls.timer_remedy
    if calls.only is not None and not end.signal:
        return _REMEDY_CALL.format(place=short_place(calls.only.place))
    if end.status is not None:
        why = _REMEDY_EXITED if end.status else _REMEDY_DONE
        # Those with this very status fit best.
        fitting = [call for call in calls.possible if call.status == end.status] or calls.possible
        listed = " or ".join(f"{call.code} at {short_place(call.place)}" for call in fitting)
        return f"{_REMEDY_LINES.format(calls=listed)}{why}" if calls.is_short else why
    if end.signal and calls.is_short:
        listed = " or ".join(f"{call.code} at {short_place(call.place)}" for call in calls.possible)
        first = _REMEDY_ITSELF.format(calls=listed) if was_there else ""
        return f"{first}{of_signal}{'' if was_there else _REMEDY_OR_ITSELF.format(calls=listed)}"
    return of_signal


def _of_signal(view: Timeline, ranks: tuple[int, ...], end: _End, frame: Frame | None) -> str:
    """What to do about processes that a signal has ended, or something unknown."""
    if end.signal == "SIGKILL":
        return _REMEDY_KILLED_FOR_MEMORY if _lacks_memory(view, ranks) else _REMEDY_KILLED
    if end.signal == "SIGSEGV" and _calls_native_code(view, ranks):
        return _REMEDY_ADDRESS
    if end.signal in _REMEDIES:
        return _REMEDIES[end.signal]
    if end.signal in _FAULTS:
        return _REMEDY_FAULT.format(how="; PYTHONFAULTHANDLER=1 prints it" if frame is None else "")
    return _REMEDY


def _calls_native_code(view: Timeline, ranks: tuple[int, ...]) -> bool:
    """Whether they were in native code that one line of the user's calls, as far as the stacks show."""
    below = (one for rank in ranks if rank in view.witnesses for one in below_user(view.witnesses[rank].stack))
    return _place(view, ranks) is not None and all(CTYPES.has(one.file, one.function) for one in below)


def _lacks_memory(view: Timeline, ranks: tuple[int, ...]) -> bool:
    """Whether memory is scarce on the host of one of them, as other ranks of the host see it."""
    neighbours = (facts for facts in view.facts.values() if any(peer.rank in ranks for peer in facts.peers))
    return any(short_of_memory(facts.host_facts) for facts in neighbours)


def _evidence(view: Timeline, ranks: tuple[int, ...], calls: ExitCalls) -> Iterable[Evidence]:
    for rank in ranks[:LISTED]:
        process = view.witnesses.get(rank)
        if process is not None:
            end = _end(view, rank)
            known = _words(end, calls, many=False) if end.signal or end.status is not None else _GONE
            yield Evidence(source="process", rank=rank, text=f"Process {process.pid} {known}.")
            if len(ranks) > 1 and (seen := _seen(view, process)) is not None:
                yield Evidence(source="process", rank=rank, text=f"Last seen {_seen_words(seen)}.")
            if process.said:
                yield Evidence(source="stderr", rank=rank, text=f"Last output on stderr: {process.said}")
        else:
            yield Evidence(
                source="exception", rank=rank, text="Did not answer, and its peers lost their connections to it."
            )


def _may_have_crashed_on_gloo(view: Timeline, rank: int) -> bool:
    """Whether it aborted itself on gloo, or crashed there and no line of the user's is known to have crashed it."""
    signal = signal_of(view, rank)
    return is_on_gloo(view) and (signal == "SIGABRT" or (signal in _NATIVE and _place(view, (rank,)) is None))


def _may_be_aborted_by_gloo(view: Timeline, ranks: tuple[int, ...], end: _End) -> bool:
    """Whether gloo may have ended one of them: nothing else is known to have, and the ranks are on gloo."""
    said = [process.said for rank in ranks if (process := view.witnesses.get(rank)) is not None and process.said]
    if end.status is not None or (said and not any(_OVERRUN in text for text in said)):
        return False
    ended = any(rank not in view.witnesses or signal_of(view, rank) in ("", "SIGABRT") for rank in ranks)
    return ended and is_on_gloo(view)


def _oom_kills(view: Timeline, ranks: tuple[int, ...]) -> list[Evidence]:
    """Kills by the out-of-memory killer on the hosts of these ranks, as other ranks of the host counted them."""
    kills = []
    for facts in view.facts.values():
        count = facts.host_facts.oom_kills or 0
        if count and any(peer.rank in ranks for peer in facts.peers):
            ended = f"{count} {'process' if count == 1 else 'processes'}"
            text = f"The kernel's out-of-memory killer has ended {ended} on {facts.host or 'this host'}."
            kills.append(Evidence(source="host", rank=facts.rank, text=text))
    return kills[:1]
