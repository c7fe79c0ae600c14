"""The other ranks of this host, as one rank sees them from outside, while they answer, are silent, or have ended."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from lightning_ncclsafe.code.side_thread import OWN_THREADS
from lightning_ncclsafe.facts import ANSWERING, COLLECTOR, ENDED, GONE, Frame, ProcessFacts
from lightning_ncclsafe.probes.host.resources import how_ended, look_at
from lightning_ncclsafe.probes.process import garbage, stacks, traceback_signal
from lightning_ncclsafe.probes.process.crash_traces import CrashTraces
from lightning_ncclsafe.probes.process.exit_status import ExitStatuses
from lightning_ncclsafe.probes.process.growth import LEAST_S, MemoryGrowth, needs_second_look, with_core_shares
from lightning_ncclsafe.probes.process.main_thread import (
    at_work,
    look_at_main_thread,
    look_at_others,
    waits_for_gil,
)
from lightning_ncclsafe.probes.process.stopping import stopping_lines
from lightning_ncclsafe.probes.rank_info import RankInfo

# Two looks are timed separately from the looks themselves.
_SLACK_S = 0.01
# How many peers are asked at a time.
_AT_ONCE = 8
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

    The guard waits for it in vain, while the main thread runs for long enough to release it, or sleeps while no other
    thread works, or one alone works for long enough. On a starved host, it takes a few looks until a thread has run
    for so long.
    """
    if not peer.has_guard:
        return False, False
    ran_s, other_ran_s = 0.0, 0.0
    working: set[int] = set()
    is_idle = is_asleep = True
    for _ in range(_MOST_LOOKS):
        before, others = look_at_main_thread(peer.pid), look_at_others(peer.pid)
        if time.monotonic() > ends_s or not waits_for_gil(peer.pid, peer.guard_threads):
            return False, False
        now, others_work = look_at_main_thread(peer.pid), at_work(others, look_at_others(peer.pid))
        ran_s += (now.ran_s or 0.0) - (before.ran_s or 0.0)
        if ran_s >= _SWITCHES_S:
            return True, False
        is_asleep = is_asleep and now.is_interruptible
        is_idle = is_idle and not at_work({peer.pid: before}, {peer.pid: now})
        # One of several may hold it, execute bytecode, and wait for a core.
        working |= others_work.keys() - {*peer.guard_threads}
        other_ran_s += sum(others_work[number] for number in working & others_work.keys())
        if is_idle and len(working) == 1 and other_ran_s >= _SWITCHES_S:
            return True, False
    sleeps = is_asleep and not ran_s and not working
    return sleeps, sleeps


class Peers:
    """Looks at other ranks of this host, and asks those that are silent.

    Args:
        growth: The memory of processes as it was seen before.
        launched: The exit codes of ranks that this process has launched and waited for, by process id; negative for
            a signal.
        look_at: Gives what the kernel shows of a process.
        ask: Asks a peer for the stack of its main thread, and whether something holds its GIL in native code.
        stopping_lines: Gives the lines that stop a process, in what these processes run.
    """

    def __init__(
        self,
        *,
        growth: MemoryGrowth,
        launched: Callable[[], Mapping[int, int]] = dict,
        look_at: Callable[..., ProcessFacts] = look_at,
        ask: Callable[[RankInfo], tuple[tuple[Frame, ...], bool]] = ask,
        stopping_lines: Callable[[Iterable[int]], tuple[str, ...]] = stopping_lines,
    ) -> None:
        self._ask = ask
        self._growth = growth
        self._launched = launched
        self._look_at = look_at
        self._stopping_lines = stopping_lines
        self._crash_traces = CrashTraces()
        self._statuses = ExitStatuses()
        self._known: tuple[RankInfo, ...] = ()

    @property
    def known(self) -> tuple[RankInfo, ...]:
        """The known ranks of this host besides this one."""
        return self._known

    @known.setter
    def known(self, peers: tuple[RankInfo, ...]) -> None:
        self._known = peers
        pids = [peer.pid for peer in peers]
        self._crash_traces.hold(pids)
        self._statuses.hold(pids)

    def close(self) -> None:
        """Closes what is open of other processes."""
        self._crash_traces.close()
        self._statuses.close()

    def look(self) -> tuple[ProcessFacts, ...]:
        """All known ranks, as :meth:`look_at` sees them."""
        return tuple(map(self.look_at, self._known))

    def look_at(self, peer: RankInfo) -> ProcessFacts:
        """A rank of this host as seen from outside, with its growth since the look before.

        If its process has ended: what it wrote last.
        """
        self._crash_traces.hold([peer.pid])
        seen = self._look_at(peer.pid, rank=peer.rank, started=peer.started or None)
        if seen.state != GONE:  # otherwise, another process may have its id
            self._statuses.hold([peer.pid])
        if (raised := self._crash_traces.raised(peer.pid)) is not None:
            seen = replace(seen, raised=replace(raised, stack=stacks.with_source(raised.stack)))
        if seen.state in ENDED:
            return self._ended(seen)
        grows, swaps = self._growth.measure(peer.pid, seen.rss_bytes, seen.swap_bytes)
        return replace(seen, memory_growth_bytes_per_s=grows, swap_growth_bytes_per_s=swaps)

    def _ended(self, seen: ProcessFacts) -> ProcessFacts:
        """Adds how it ended: according to the kernel, its launcher, or its own crash trace."""
        ended_by, stack, said, thread_stack = self._crash_traces.of(seen.pid)
        code = self._launched().get(seen.pid, self._statuses.of(seen.pid)) if seen.state == GONE else None
        if code is not None:
            kernels, exit_code = how_ended(code)
            seen = replace(seen, ended_by=kernels, exit_code=exit_code)
        # A process that aborts may crash while it writes its trace.
        seen_by = "" if (ended_by, seen.ended_by) == ("SIGABRT", "SIGSEGV") else seen.ended_by
        ended_by = seen_by or (ended_by if seen.exit_code is None else "")
        said = said if ended_by in ("", "SIGABRT") and seen.exit_code is None else ""
        own, others = stacks.with_source_in_time(stack), stacks.with_source_in_time(thread_stack)
        last = self._crash_traces.last_seen(seen.pid)
        if last is not None:
            last = replace(last, stack=stacks.with_source_in_time(last.stack))
        return replace(seen, ended_by=ended_by, stack=own, thread_stack=others, said=said, last_seen=last)

    def witness(self, silent: Iterable[RankInfo]) -> list[ProcessFacts]:
        """Ranks of this host that do not answer, as seen from outside, with their stacks if they run.

        Takes 0.5 s if their growth is not known yet, or they run, up to 2 s for them to answer signals, and up to 1 s
        to search what may have stopped one.
        """
        peers, began_s = list(silent), time.monotonic()
        turns = [look_at_main_thread(peer.pid) for peer in peers]
        seen = self._witness(peers)
        unknown = [facts for facts in seen if facts.rss_bytes is not None and needs_second_look(facts)]
        if unknown:
            time.sleep(LEAST_S + _SLACK_S)  # since the last of them was seen: on a busy host, looking takes time
        again = [self.look_at(peer) if facts in unknown else facts for peer, facts in zip(peers, seen, strict=True)]
        span_s = time.monotonic() - began_s
        shared = [
            with_core_shares(
                replace(now, stack=then.stack or now.stack, gil_held=then.gil_held),
                turn,
                look_at_main_thread(now.pid),
                span_s,
            )
            for now, then, turn in zip(again, seen, turns, strict=True)
        ]
        return self._with_stopping_lines(shared)

    def _with_stopping_lines(self, seen: list[ProcessFacts]) -> list[ProcessFacts]:
        if not any(one.state == psutil.STATUS_STOPPED for one in seen):
            return seen
        lines = self._stopping_lines([os.getpid(), *(peer.pid for peer in self._known)])
        return [replace(one, stopping_at=lines) if one.state == psutil.STATUS_STOPPED else one for one in seen]

    def _witness(self, peers: Sequence[RankInfo]) -> list[ProcessFacts]:
        seen = [self.look_at(peer) for peer in peers]
        running = [peer for peer, facts in zip(peers, seen, strict=True) if facts.state in ANSWERING]
        if not running:
            return seen
        # At the same time, as each takes a while to answer.
        with ThreadPoolExecutor(min(len(running), _AT_ONCE), thread_name_prefix=f"{OWN_THREADS}witness") as pool:
            answers = dict(zip(running, pool.map(self._ask, running), strict=True))
        for index, peer in enumerate(peers):
            stack, gil_held = answers.get(peer, ((), False))
            if stack:
                now = self.look_at(peer)
                seen[index] = replace(now, stack=stacks.with_source_in_time(stack), gil_held=gil_held)
        return seen
