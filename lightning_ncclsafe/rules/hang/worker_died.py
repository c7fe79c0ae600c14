"""The cause worker-died: a process that works for a rank was killed or failed, and the rank waits for it."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from lightning_ncclsafe.code.libraries import (
    DATALOADER,
    HANDING_OVER,
    POOL_PROCESS,
    POOL_RESULT,
    POOL_TASK,
    WAITS_FOR_PROCESSES,
)
from lightning_ncclsafe.facts import EndedProcess, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    REMEDY_MAPPED_FILE,
    Confidence,
    Evidence,
    ExitCalls,
    Finding,
    Plan,
    Severity,
    Timeline,
    at_words,
    batch_words,
    below_user,
    clause,
    deepest_user_frame,
    duration_words,
    exception_evidence,
    exception_place,
    exit_calls,
    finding,
    first_user_frame,
    hang_rule,
    how_we_know,
    is_in,
    location_of,
    memory_evidence,
    message_of,
    says_shm_is_full,
    short_of_memory,
    short_place,
    type_and_place,
    unless_caught,
    where_words,
    while_others_wait,
)

# Messages of torch's loader and of Python's process pool.
_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<status>\d+))?)"
    r"|process pool was terminated abruptly|subprocesses has abruptly died"
)
# Code that waits for data from another process.
_WAITS = WAITS_FOR_PROCESSES | DATALOADER
# What a rank raises if a worker dies while it hands over a batch.
_BROKEN = ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError", "FileNotFoundError")
_KILLS = ("SIGKILL", "Killed")
_BUS_ERROR = ("SIGBUS", "Bus error")
_CPU_TIME = ("SIGXCPU", "CPU time limit exceeded")
_ENDS = ("SIGTERM", "Terminated", "SIGINT", "Interrupt", "SIGHUP", "Hangup")
_RAISED = 1
_ENDED = "exited without an error message"
_REMEDY = (
    "A worker killed by SIGSEGV or SIGABRT failed in native code (a decoder, a library that was "
    "initialised before the fork): run with num_workers=0 to see the error, or with multiprocessing_context='spawn'."
)
# What has probably sent a SIGKILL, the most probable first.
_OF_MEMORY = (
    "SIGKILL comes from outside: from the kernel's out-of-memory killer (see dmesg, memory.events of the control "
    "group), a scheduler, or another user, or from the kernel, as the process had used up its CPU time (RLIMIT_CPU, "
    "ulimit -t)."
)
_OF_ANY = (
    "SIGKILL comes from outside: from a scheduler or another user, or from the kernel, as the process had used up its "
    "CPU time (RLIMIT_CPU, ulimit -t) or as memory ran out (see dmesg, memory.events of the control group)."
)
_LESS = (
    " If memory ran out, use less: fewer workers, a smaller prefetch_factor, data in arrays instead of Python objects."
)
_REMEDY_CPU_TIME = (
    "The process had used up its CPU time: find out what limits it (RLIMIT_CPU: ulimit -t in the job's shell, "
    "resource.setrlimit in the code, the scheduler), and raise that limit, or let each process do less."
)
_REMEDY_EXITED = (
    "It exited with this status by itself: look at its output for a traceback, and for sys.exit and os._exit in the "
    "dataset and what it calls; run with num_workers=0 to see the error."
)
_REMEDY_ENDED = (
    "Something asked it to exit: a scheduler whose time limit is reached or that takes the host away, Ctrl-C, kill. "
    "Find out what ended the job, rather than looking at its workers."
)
# Of a process that is no worker of a loader.
_REMEDY_OWN = (
    "A process killed by SIGSEGV or SIGABRT failed in native code: do its work in the rank itself to see the "
    "error, or start it with the method 'spawn' if a library was initialised before the fork."
)
_LESS_OWN = " If memory ran out, give that process less to hold."
_LESS_POOL = _LESS_OWN + " A smaller pool (num_proc, max_workers) and smaller batches need less at a time."
_REMEDY_OWN_EXITED = (
    "It exited with this status by itself: look at its output for a traceback, and for sys.exit and os._exit in what "
    "it runs. If it shares a pipe with the rank, close the end of it there that is not the rank's: only then does recv "
    "raise EOFError."
)
_REMEDY_OWN_RAISED = (
    "Correct this exception. A process only prints it: to let the rank know, catch it there and send it to the rank."
)
_REMEDY_OWN_CALL = "Look first at what leads to {code} at {place}. If it was not that: "
_REMEDY_GONE = (
    "Find out why that process returns while the rank still needs it (an idle time, a sentinel, the end of its input), "
    "and start it again before it is asked."
)
_REMEDY_WAIT = (
    "So that the rank does not wait for a dead process, wait with a timeout and check Process.is_alive() or its "
    "exitcode."
)
_REMEDY_POOL = (
    "concurrent.futures.ProcessPoolExecutor raises BrokenProcessPool if one of its processes ends, where "
    "multiprocessing.Pool waits forever."
)

# For about this long, batches come that were made before a worker ended.
_PREFETCHED_S = 60.0


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``restart`` if something else killed or ended it; ``unknown`` for lack of memory, a crash or an exit."""
    named = [view.facts[rank] for rank in finding.ranks]
    in_messages = {(match["signal"] or "").strip() for facts in named if (match := _worker_message(facts))}
    signals = in_messages | {child.signal for facts in named for child in facts.machine.ended if child.signal}
    is_from_outside = bool(signals) and signals <= {*_KILLS, *_ENDS}
    return Plan.RESTART if is_from_outside and not any(facts.host_facts.oom_kills for facts in named) else Plan.UNKNOWN


@hang_rule(after="shm-exhausted", reads_exceptions=True, plan=_plan)
def worker_died(view: Timeline) -> Iterator[Finding]:
    """A process that makes a rank's batches, or otherwise works for it, is dead.

    Symptom:
        "DataLoader worker (pid 4711) is killed by signal: Killed" or "exited unexpectedly" on one rank, at whatever
        line it was, or it waits for a queue that nobody fills, or for a pool that replaced its worker; all others wait
        for it.

    Cause:
        The out-of-memory killer, a segmentation fault in a decoder, a bus error; a library that does not survive a
        fork.

    Remedy:
        Use less memory; run without workers to see the error.

    Cannot see:
        What killed it, beyond the signal and the kernel's counter; the line at which a worker crashed that was spawned;
        how a worker ended that lived for less than a second before a pool replaced it, or, before Linux 5.3, any that
        was replaced.
    """
    alike: dict[tuple[str, Confidence], dict[int, str]] = defaultdict(dict)
    for rank in view.raised:
        facts = view.facts[rank]
        if (match := _worker_message(facts)) and not says_shm_is_full(facts):
            pids = match["pids"] or ""
            ended = _named(facts, pids) if pids else filter(lambda one: one.signal, facts.machine.ended)
            signal = (match["signal"] or "").strip() or next((one.signal for one in ended), "")
            alike[signal, Confidence.CERTAIN][rank] = pids
        elif _lost_worker(facts):
            signal, confidence, pid = _killed_worker(facts)
            alike[signal, confidence][rank] = pid
    for (signal, confidence), workers in alike.items():
        yield _raised(view, workers, signal, confidence)
    yield from filter(None, (_of_waiting(view, rank) for rank in view.working(view.suspects)))


def _of_waiting(view: Timeline, rank: int) -> Finding | None:
    facts = view.facts[rank]
    if facts.machine.ended and (view.activities[rank].waits_for_data or _waits_for_a_process(facts)):
        return _waits_in_vain(view, rank)
    if facts.machine.done and facts.reads_alone and _waits_for_users_process(facts):
        return _waits_for_nobody(view, rank)
    processes = _idle_pool(facts)
    return _lost_task(view, rank, processes) if processes else None


def _worker_message(facts: RankFacts) -> re.Match[str] | None:
    return _DIED.search(message_of(facts))


def _named(facts: RankFacts, pids: str) -> Iterator[EndedProcess]:
    """Those of its ended children whose process ids a message lists."""
    listed = pids.split(", ")
    return (child for child in facts.machine.ended if str(child.pid) in listed)


def _lost_worker(facts: RankFacts) -> bool:
    """Whether a worker of its loader disappeared while it handed over a batch."""
    exception = facts.exception
    if exception is None or exception.type not in _BROKEN:
        return False
    return is_in(HANDING_OVER, exception.stack) and is_in(DATALOADER, exception.stack)


def _killed_worker(facts: RankFacts) -> tuple[str, Confidence, str]:
    """The signal that killed its worker, the confidence, and the worker's process id."""
    # The loader asks the other workers to exit, which they do with code 0.
    killed = next((child for child in facts.machine.ended if child.signal), None)
    return (killed.signal, Confidence.CERTAIN, str(killed.pid)) if killed else ("", Confidence.LIKELY, "")


def _waits_for_a_process(facts: RankFacts) -> bool:
    return is_in(_WAITS, facts.stack[-4:])


def _waits_for_users_process(facts: RankFacts) -> bool:
    """Whether it waits for a process of the user's; torch's loader watches its own workers and raises if one dies."""
    return _waits_for_a_process(facts) and not is_in(DATALOADER, below_user(facts.stack))


def _raised(view: Timeline, pids: dict[int, str], signal: str, confidence: Confidence) -> Finding:
    ranks = tuple(pids)
    facts = view.facts[ranks[0]]
    how = clause(ranks, "was|were killed by a signal") + f" ({signal})" if signal else clause(ranks, _ENDED)
    whose = f"The loader's worker {pids[ranks[0]]}" if pids[ranks[0]] else "A worker process"
    is_of_pool = not any(pids.values()) and _worker_message(facts) is not None
    frame = first_user_frame(child.stack for child in _named(facts, pids[ranks[0]]))
    # A pool is the user's own, and raises where it is used.
    frame = exception_place(facts) if is_of_pool else frame
    calls = _exit_calls(view, ranks, signal)
    at = at_words(frame) if calls.only is None else f", as after {calls.words}"
    known = partial(_evidence_of_own, signal=signal, calls=calls) if is_of_pool else _evidence
    if is_of_pool:
        at = f", and {clause(ranks, 'has|have raised')} {type_and_place(facts)[0]}{at}"
    killer = _killer(facts, signal or _KILLS[0])
    waiting = while_others_wait(view, ranks)
    text = f"{whose if len(ranks) == 1 else 'Workers'} of {how}{at}{killer}, {batch_words(facts.progress)}{waiting}."
    listed = (view.facts[rank] for rank in ranks[:LISTED])
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        confidence=unless_caught(view, confidence if calls.only is None else Confidence.LIKELY),
        evidence=(
            *(item for facts in listed for item in (*exception_evidence(facts), *known(facts))),
            *(() if is_of_pool else calls.evidence(ranks[0])),
        ),
        remedy=_remedy_raised(facts, signal, calls, is_of_pool=is_of_pool),
        location=calls.location or location_of(frame),
    )


def _exit_calls(view: Timeline, ranks: tuple[int, ...], signal: str) -> ExitCalls:
    """The statements that may have ended the workers of these ranks, which a loader has reported."""
    if signal:
        return exit_calls(view, status=None, signal=signal, may_raise=True)
    statuses = {_exit_status(view.facts[rank]) for rank in ranks}
    if len(statuses) > 1 or None in statuses:
        return ExitCalls(None, ())
    return _calls(view, statuses.pop(), "")


def _calls(view: Timeline, status: int | None, signal: str) -> ExitCalls:
    calls = exit_calls(view, status=status, signal=signal, may_raise=True)
    # A child that has raised exits with it, too: a spawned worker that cannot load its dataset.
    return calls._replace(only=None) if status == _RAISED else calls


def _exit_status(facts: RankFacts) -> int | None:
    """The status with which the one worker that a message lists has exited by itself; None if it is unknown."""
    match = _worker_message(facts)
    if match is None or not (match["pids"] or "").isdigit():
        return None
    pid = int(match["pids"])
    known = {child.pid: child.exit_code for child in facts.machine.ended} | dict.fromkeys(facts.machine.done, 0)
    return int(match["status"]) if match["status"] else known.get(pid)


def _waits_in_vain(view: Timeline, rank: int) -> Finding:
    facts = view.facts[rank]
    ended = facts.machine.ended
    killed = tuple(child for child in ended if child.signal)
    chosen = (killed or ended)[0]
    is_own = _waits_for_users_process(facts)
    waits = "waits for another process" if is_own else "waits for its dataloader"
    frame = deepest_user_frame(chosen.stack)
    calls = ExitCalls(None, ()) if chosen.raised else _calls(view, chosen.exit_code, chosen.signal)
    of_end = _evidence_of_own(facts, chosen.signal, calls) if is_own else (*_evidence(facts), *calls.evidence(rank))
    text = (
        f"Rank {rank} {waits}, and its child process {chosen.pid} {_end_words(chosen)}{at_words(frame)}"
        f"{_killer(facts, chosen.signal)}: {where_words(view, rank)}{while_others_wait(view, (rank,))}."
    )
    return finding(
        view,
        (rank,),
        text,
        confidence=_confidence(facts, is_own=is_own),
        location=location_of(frame) if frame is not None else None,
        evidence=(*of_end, *how_we_know(view, (rank,))),
        remedy=_remedy_of_own(facts, chosen, calls) if is_own else _remedy_of_end(facts, chosen),
    )


def _waits_for_nobody(view: Timeline, rank: int) -> Finding:
    """The processes that could have answered have exited as they should, and nobody has started others."""
    facts = view.facts[rank]
    children = facts.machine.done[-LISTED:]
    ended = f"its child process {children[0]} has" if len(children) == 1 else "some of its child processes have"
    text = (
        f"Rank {rank} waits for another process, but reads from a pipe that no other process has open, and {ended} "
        f"exited with status 0: {where_words(view, rank)}{while_others_wait(view, (rank,))}."
    )
    listed = f"Child processes that have exited with status 0: {', '.join(map(str, children))}."
    evidence = (Evidence(source="process", rank=rank, text=listed), *how_we_know(view, (rank,)))
    remedy = f"{_REMEDY_GONE} {_REMEDY_WAIT}"
    return finding(view, (rank,), text, confidence=Confidence.LIKELY, evidence=evidence, remedy=remedy)


def _remedy_raised(facts: RankFacts, signal: str, calls: ExitCalls, *, is_of_pool: bool) -> str:
    if is_of_pool and signal not in _ENDS:
        return _why_signalled(facts, signal, less=_LESS_POOL, crashed=_REMEDY_OWN)
    if calls.timer_remedy:
        return calls.timer_remedy
    if signal:
        return _remedy(facts, signal)
    return _remedy(facts, signal) if calls.only is None else _REMEDY_EXITED


def _remedy_of_end(facts: RankFacts, child: EndedProcess) -> str:
    return _remedy(facts, child.signal) if child.exit_code is None else _REMEDY_EXITED


def _remedy_of_own(facts: RankFacts, child: EndedProcess, calls: ExitCalls) -> str:
    """What to do about a process of the user's: a call of the code that ends processes so is the first suspect."""
    if child.signal in _ENDS:
        why = _REMEDY_ENDED
    elif child.raised:
        why = _REMEDY_OWN_RAISED
    elif child.exit_code is not None:
        why = _REMEDY_OWN_EXITED
    else:
        why = _why_signalled(facts, child.signal, less=_LESS_OWN, crashed=_REMEDY_OWN)
    call = calls.possible[0] if len(calls.possible) == 1 else None
    if call is not None and child.signal:
        why = _REMEDY_OWN_CALL.format(code=call.code, place=short_place(call.place)) + why
    return f"{why} {_REMEDY_POOL if is_in(POOL_RESULT, below_user(facts.stack)) else _REMEDY_WAIT}"


def _evidence_of_own(facts: RankFacts, signal: str, calls: ExitCalls) -> Iterator[Evidence]:
    """The same as of a loader's worker, without the loader; the rank's memory, only if that may have run out."""
    yield from _ended_evidence(facts)
    yield from calls.evidence(facts.rank)
    yield from _kills_evidence(facts)
    if signal in _KILLS:
        yield from memory_evidence(facts)


def _idle_pool(facts: RankFacts) -> tuple[int, ...]:
    """The processes of the pool for whose result a rank waits, if all of them wait for a task; empty otherwise.

    A pool of multiprocessing replaces a process that has ended, and forgets the task that it had.
    """
    if not is_in(POOL_RESULT, below_user(facts.stack)) or not all(worker.stack for worker in facts.workers):
        return ()
    of_pool = [worker for worker in facts.workers if is_in(POOL_PROCESS, worker.stack)]
    idle = (
        worker.pid
        for worker in of_pool
        if any(
            POOL_PROCESS.has(frame.file, frame.function) and POOL_TASK.has(called.file, called.function)
            for frame, called in itertools.pairwise(worker.stack)
        )
    )
    pids = tuple(idle)
    return pids if len(pids) == len(of_pool) else ()


def _lost_task(view: Timeline, rank: int, processes: tuple[int, ...]) -> Finding:
    listed = f"process {processes[0]} waits" if len(processes) == 1 else f"all {len(processes)} processes wait"
    text = (
        f"Rank {rank} waits for a result of its process pool, in which {listed} for a task: the process that had the "
        f"task has probably ended, and the pool has started another one without the task: {where_words(view, rank)}"
        f"{while_others_wait(view, (rank,))}."
    )
    facts = view.facts[rank]
    evidence = (*_ended_evidence(facts), *_kills_evidence(facts), *memory_evidence(facts), *how_we_know(view, (rank,)))
    why = _why_signalled(facts, "", less=_LESS_OWN, crashed=_REMEDY_OWN)
    return finding(view, (rank,), text, evidence=evidence, remedy=f"{why} {_REMEDY_POOL}")


def _confidence(facts: RankFacts, *, is_own: bool) -> Confidence:
    """How sure it is that the rank waits for a dead process: certain if its loader lacks one of its workers."""
    if is_own:
        return Confidence.LIKELY
    if not _misses_a_worker(facts):
        return Confidence.POSSIBLE
    # A loader of iterable data lets workers go that have come to their end, and other children fail, too.
    workers = {worker.pid for worker in facts.workers}
    # A program that the user's code has started and killed is a child, too, but the loader goes on after that.
    gone_on_s = facts.progress.idle_s + _PREFETCHED_S
    is_sure = any(
        child.pid in workers or (child.signal and (child.ago_s or 0.0) <= gone_on_s) for child in facts.machine.ended
    )
    return Confidence.CERTAIN if is_sure else Confidence.LIKELY


def _misses_a_worker(facts: RankFacts) -> bool:
    alive = [worker for worker in facts.workers if worker.state not in ("gone", "zombie")]
    started = max((loader.num_workers for loader in facts.loaders), default=0)
    is_known = not any(text.startswith("workers:") for text in facts.missing)
    return is_known and len(alive) < started


def _end_words(child: EndedProcess) -> str:
    if child.raised:
        return f"was ended by {child.raised}"
    return f"was killed by {child.signal}" if child.signal else f"exited with code {child.exit_code}"


def _killer(facts: RankFacts, signal: str) -> str:
    has_struck = signal in _KILLS and facts.host_facts.oom_kills
    return ", and the kernel's out-of-memory killer was active on its host" if has_struck else ""


def _evidence(facts: RankFacts) -> Iterator[Evidence]:
    yield from _ended_evidence(facts)
    yield from _kills_evidence(facts)
    for loader in facts.loaders:
        text = f"{loader.dataset or 'A dataset'} is read with num_workers={loader.num_workers}."
        yield Evidence(source="loader", rank=facts.rank, text=text)
    yield from memory_evidence(facts)


def _ended_evidence(facts: RankFacts) -> Iterator[Evidence]:
    for child in facts.machine.ended[:LISTED]:
        ago = f" {duration_words(child.ago_s)} ago" if child.ago_s is not None else ""
        then = "; its parent has collected it, and may have replaced it" if child.is_replaced else ""
        text = f"Process {child.pid}, a child of this rank, {_end_words(child)}{ago}{then}."
        yield Evidence(source="process", rank=facts.rank, text=text)


def _kills_evidence(facts: RankFacts) -> Iterator[Evidence]:
    if kills := facts.host_facts.oom_kills:
        text = (
            f"The kernel's out-of-memory killer has ended {kills} process{'' if kills == 1 else 'es'} since the start."
        )
        yield Evidence(source="host", rank=facts.rank, text=text)


def _remedy(facts: RankFacts, signal: str) -> str:
    if signal in _ENDS:
        return _REMEDY_ENDED
    return _why_signalled(facts, signal, less=_LESS, crashed=_REMEDY)


def _why_signalled(facts: RankFacts, signal: str, *, less: str, crashed: str) -> str:
    """What to do about a process that no request to exit has ended.

    Args:
        less: What to do if memory ran out.
        crashed: What to do if it crashed.
    """
    if signal in _CPU_TIME:
        return _REMEDY_CPU_TIME
    if signal in _BUS_ERROR:
        return REMEDY_MAPPED_FILE
    if _is_of_memory(facts):
        return _OF_MEMORY + less
    return _OF_ANY + less if signal in _KILLS else crashed


def _is_of_memory(facts: RankFacts) -> bool:
    """Whether the kernel's counter or the memory that is left speaks for its out-of-memory killer."""
    return bool(facts.host_facts.oom_kills) or short_of_memory(facts.host_facts)
