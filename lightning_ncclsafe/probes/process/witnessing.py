"""What two looks at a process and its Python threads tell of why it does not answer."""

from collections.abc import Iterable
from dataclasses import replace

from lightning_ncclsafe.code.marks import Mark
from lightning_ncclsafe.facts import Frame, ProcessFacts
from lightning_ncclsafe.probes.process.growth import LEAST_S
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread

ANSWERING = ("running", "sleeping", "idle")
"""States in which a process can be asked for its stack."""


def needs_time(seen: ProcessFacts) -> bool:
    """Whether only what happens between two looks tells what keeps it from answering."""
    return seen.memory_growth_bytes_per_s is None or (seen.state in ANSWERING and bool(seen.stack))


def with_shares(facts: ProcessFacts, before: ThreadLook, span_s: float) -> ProcessFacts:
    """With how much of a core its main thread got since then, and for how much of the time it had to wait for one."""
    if span_s < LEAST_S:
        return facts
    now = look_at_main_thread(facts.pid)
    ran, queued = _share(before.ran_s, now.ran_s, span_s), _share(before.queued_s, now.queued_s, span_s)
    return replace(facts, ran_share=ran, queued_share=queued)


def _share(before: float | None, now: float | None, span_s: float) -> float | None:
    return None if before is None or now is None else round(min(max((now - before) / span_s, 0.0), 1.0), 3)


def guard_rests(threads: Iterable[tuple[Frame, ...]]) -> bool:
    """Whether the guard's thread only waits for its next turn, which comes several times a second, if it can."""
    below = [_below_watchdog(stack) for stack in threads]
    guards = [functions for functions in below if functions is not None]
    return bool(guards) and all({*functions} == {"wait"} for functions in guards)


def _below_watchdog(stack: tuple[Frame, ...]) -> list[str] | None:
    depths = [depth for depth, frame in enumerate(stack) if frame.mark == Mark.WATCH]
    return [frame.function for frame in stack[depths[-1] + 1 :]] if depths else None
