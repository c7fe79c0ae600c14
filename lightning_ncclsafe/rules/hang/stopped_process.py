"""The cause stopped-process: a rank's process is stopped, by a signal, a debugger or its control group."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Plan,
    Reason,
    Timeline,
    hang_rule,
    short_place,
    silent_finding,
    silent_processes,
)

_SIGNAL = (
    "Send SIGCONT to process {pid} on its host (kill -CONT {pid}). It was sent SIGSTOP or SIGTSTP: by Ctrl-Z, a "
    "scheduler that suspends jobs (scontrol suspend), or a tool that stops processes for a while."
)
_OWN = "If this job's own code stops processes, check when it stops them, and whether it always continues them."
_DEBUGGER = "Continue process {pid} in its debugger or tracer, or detach it (TracerPid in /proc/{pid}/status)."
_FREEZER = (
    "Thaw the control group of process {pid} (docker unpause, crictl, or freezer.state / cgroup.freeze of its group): "
    "a container's or a scheduler's pause has frozen it."
)


@hang_rule(after="dead-rank", plan=Plan.RESTART)
def stopped_process(view: Timeline) -> Iterator[Finding]:
    """A rank's process is stopped; nothing in it can run, not even the guard.

    Symptom:
        All other ranks wait; one prints nothing, does not answer and uses no CPU time, and its process is in
        state T, or frozen.

    Cause:
        SIGSTOP or SIGTSTP (Ctrl-Z, a scheduler that suspends jobs), a debugger, a paused container.

    Remedy:
        Continue it: SIGCONT, the debugger's continue, thaw the container.

    Cannot see:
        Who stopped it, unless the job's own Python code does that; a process on a host where no rank answers.
    """
    for rank, process in silent_processes(view, Reason.STOPPED):
        words, remedy = _words_and_remedy(process)
        remedy = remedy.format(pid=process.pid)
        found = silent_finding(view, rank, process, words, remedy=remedy, confidence=Confidence.CERTAIN)
        yield _with_lines(found, process)


def _with_lines(found: Finding, process: ProcessFacts) -> Finding:
    """The same finding, with the lines of the job's own programs that may have stopped the process."""
    if not process.stopping_at:
        return found
    listed = ", ".join(map(short_place, process.stopping_at))
    is_one = len(process.stopping_at) == 1
    return replace(
        found,
        summary=f"{found.summary} This job's own code may have done that, at {listed}.",
        location=process.stopping_at[0] if is_one else found.location,
        remedy=f"{found.remedy} {_OWN}",
    )


def _words_and_remedy(process: ProcessFacts) -> tuple[str, str]:
    if process.state == "tracing-stop":
        return "stopped by a debugger", _DEBUGGER
    if process.state == "stopped":
        return "stopped by a signal (SIGSTOP)", _SIGNAL
    return "frozen with its control group, as by a paused container", _FREEZER
