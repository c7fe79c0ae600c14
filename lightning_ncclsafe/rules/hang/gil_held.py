"""The cause gil-held: native code in a rank keeps Python's global interpreter lock."""

import re
from collections.abc import Iterator

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Reason,
    Timeline,
    deepest_user_frame,
    hang_rule,
    place_words,
    silent_finding,
    silent_processes,
    waits_for_silent_device,
)

_REMEDY = (
    "Make what {line} calls shorter (another pattern, parts of the data), or call it in another process. In an "
    "extension of your own, release the lock while it works (Py_BEGIN_ALLOW_THREADS, pybind11's gil_scoped_release, "
    "ctypes.CDLL instead of PyDLL). Which function it is: py-spy dump --native --pid {pid}."
)
_REMEDY_PYTHON = (
    "By its code, this line may use Python's own {what}, which lets no other thread run meanwhile: {how}, or do it in "
    "another process that is ended after a time limit. If it is something else, this names the function: py-spy dump "
    "--native --pid {pid}."
)
# What a line calls that computes in Python itself, and can take any time for a short input.
_PYTHONS = (
    (
        re.compile(r"\bre\.\w+\(|\.(?:match|fullmatch|search|findall|finditer|subn?)\("),
        "matching of regular expressions",
        "write the pattern without repetitions that can match the same text (`(a+)+`, `.*.*`; Python 3.11 has `a++` "
        "and `(?>…)`), limit the length of the text",
    ),
    (
        # A power has a value before it, unlike arguments that are passed on.
        re.compile(r"[\w)\]]\s*\*\*|(?<![\w.])pow\(|\b(?:factorial|comb|perm|lcm)\(|<<"),
        "arithmetic of whole numbers of any size",
        "limit the numbers, above all exponents, before this line",
    ),
)
# A main thread that gets at least this share of a core is not merely too slow to answer.
_GETS_A_CORE = 0.5


@hang_rule(after="gc-pause")
def gil_held(view: Timeline) -> Iterator[Finding]:
    """Native code holds Python's global interpreter lock, so no other thread of the rank can run Python.

    Symptom:
        All other ranks wait; one does not answer, and its loggers, heartbeats and watchdog threads stop too ("watchdog
        got stuck for 480 seconds"), while its process runs or sleeps in C.

    Cause:
        A C or C++ extension that computes or waits without releasing the lock: a call through ctypes.PyDLL, a regular
        expression or a sum over huge data, waiting for another lock while holding this one (a deadlock).

    Remedy:
        Release the lock in the native code, or call it in another process.

    Cannot see:
        Which native function it is, only the Python line that called it. If the main thread sleeps, whether that line
        or another thread called it.
    """
    for rank, process in silent_processes(view, Reason.GIL):
        yield silent_finding(
            view,
            rank,
            process,
            _words(process),
            remedy=_remedy(process, "this line" if _is_running(process) else "this line, or another thread,"),
            # A process that sleeps or gets little CPU time may also have a guard that is late on an overloaded host.
            confidence=Confidence.CERTAIN
            if _is_running(process) and (process.ran_share or 0.0) >= _GETS_A_CORE
            else Confidence.LIKELY,
        )
    # The rank has answered since, when no other rank waited for it any more. Where calls differ, they are why all wait.
    if not view.stragglers and not view.behind and not view.raised and view.divergence is None:
        for process in view.job.witnessed:
            facts = view.facts.get(process.rank)
            # A thread that waits for a device computes, too, and keeps no lock.
            if facts is None or waits_for_silent_device(facts):
                continue
            if process.gil_held and deepest_user_frame(process.stack):
                yield _released(view, process)


def _released(view: Timeline, process: ProcessFacts) -> Finding:
    """The signal that asked for the stack ended the native call, as it ends sleep() and the like."""
    words = f"back since a signal asked for its stack, and was {_words(process)}"
    return silent_finding(view, process.rank, process, words, remedy=_remedy(process, "this line, or another thread,"))


def _remedy(process: ProcessFacts, line: str) -> str:
    """What to do: what Python itself computes while it runs follows from the code of the user's line."""
    frame = deepest_user_frame(process.stack)
    code = frame.code if frame is not None and _is_running(process) else ""
    for pattern, what, how in _PYTHONS:
        if pattern.search(code):
            return _REMEDY_PYTHON.format(what=what, how=how, pid=process.pid)
    return _REMEDY.format(pid=process.pid, line=line)


def _is_running(process: ProcessFacts) -> bool:
    return process.state == "running"


def _words(process: ProcessFacts) -> str:
    frame = deepest_user_frame(process.stack)
    where = place_words(frame) if frame else "from Python"
    caller = where if _is_running(process) else f"{where}, or by another thread"
    return f"{process.state} with Python's global interpreter lock held by native code called {caller}"
