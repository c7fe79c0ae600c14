"""Asks another rank of this host for the stack of its main thread, and finds out whether native code holds its GIL."""

import time

from lightning_ncclsafe.facts import COLLECTOR, Frame
from lightning_ncclsafe.probes.process import garbage, traceback_signal
from lightning_ncclsafe.probes.process.main_thread import (
    another_thread_runs,
    look_at_main_thread,
    other_threads_ran_s,
    waits_for_gil,
)
from lightning_ncclsafe.probes.rank_info import RankInfo

# How often a peer is looked at again, as its guard may have had a turn meanwhile.
_LOOKS_AFTERWARDS = 3
# How often a peer is looked at until its main thread has run for long enough, or has slept all the time.
_MOST_LOOKS = 3
# No look begins later than this: the rank that gathers the facts waits for this one.
_LOOKS_S = 1.5
# A thread that executes bytecode for so long has released the GIL at least twice, if others wait for it.
_SWITCHES_S = 0.02


def ask(peer: RankInfo) -> tuple[tuple[Frame, ...], bool]:
    """The stack of a peer's main thread, and whether something holds its GIL in native code."""
    armed = traceback_signal.armed_in(peer.pid)
    if armed is None:
        return (), False
    ends_s = time.monotonic() + _LOOKS_S
    collects, began = garbage.collects_garbage(peer.pid), look_at_main_thread(peer.pid)
    is_held, slept = _holds_gil(peer, ends_s)
    stack = traceback_signal.ask(peer.pid, armed)
    # The signal ends a sleep in native code. Where native code calls Python's handler, other threads have a turn.
    again = (_holds_gil(peer, ends_s)[0] for _ in range(_LOOKS_AFTERWARDS))
    is_held = is_held and bool(stack) and (slept or any(again))
    collects = collects and garbage.collects_garbage(peer.pid)
    # A main thread that sleeps does not collect: another thread does, and the line has nothing to do with it.
    if stack and collects and not (began.is_interruptible or look_at_main_thread(peer.pid).is_interruptible):
        stack = (*stack, Frame(file=COLLECTOR, line=0, function="collect"))
    return stack, is_held


def _holds_gil(peer: RankInfo, ends_s: float) -> tuple[bool, bool]:
    """Whether a thread of a peer holds the GIL in native code, and whether its main thread sleeps.

    The guard waits for it in vain, while the main thread runs for long enough to release it, or sleeps and no other
    thread works. On a starved host, it takes a few looks until the main thread has run for so long.
    """
    if not peer.has_guard:
        return False, False
    ran_s, sleeps = 0.0, True
    for _ in range(_MOST_LOOKS):
        before, others = look_at_main_thread(peer.pid), other_threads_ran_s(peer.pid)
        if time.monotonic() > ends_s or not waits_for_gil(peer.pid, peer.guard_threads):
            return False, False
        now = look_at_main_thread(peer.pid)
        ran_s += (now.ran_s or 0.0) - (before.ran_s or 0.0)
        if ran_s >= _SWITCHES_S:
            return True, False
        # Another thread that works may be the one that holds it, and execute bytecode.
        sleeps = sleeps and now.is_interruptible and not ran_s and not another_thread_runs(peer.pid, others)
    return sleeps, sleeps
