"""A run of a year keeps no more than one of an hour: of ten times as much, as many bytes are held.

Limits are made small, so that they are reached at once; that what they bound is kept at all, others test.
"""

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
from timing_builders import Job, S

from lightning_ncclsafe.timing import analysis as analysis_module
from lightning_ncclsafe.timing import history, matching
from lightning_ncclsafe.timing.analysis import Analysis
from lightning_ncclsafe.timing.summary import StepPhase
from lightning_ncclsafe.timing.windows import GroupMembers, OpTotal, Window

FEW_BYTES = 30_000


def grown_bytes(feed: Callable[[int], object], *, few: int, many: int) -> int:
    """By how much what is held grows from ``few`` calls to ``many``, by the half of them in which it grows less.

    What comes and goes is not all that comes to stay: that grows in both.
    """
    held = []
    tracemalloc.start()
    try:
        for number in range(many):
            if number in (few, (few + many) // 2):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
            feed(number)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        first, second = held[1] - held[0], held[2] - held[1]
        return 2 * min(first, second)
    finally:
        tracemalloc.stop()


def keep(monkeypatch: pytest.MonkeyPatch, *, for_ns: int) -> None:
    for module in (history, analysis_module):
        monkeypatch.setattr(module, "KEPT_NS", for_ns)


def later(told: Window, number: int, *, steps: int, lasts_ns: int) -> Window:
    """The same again, as the windows after it."""
    calls, spans = told.calls.copy(), told.spans.copy()
    calls["seq"] += number * steps
    calls["step"] += number * steps
    calls["created_ns"] += number * lasts_ns
    spans["begin_ns"] += number * lasts_ns
    return replace(told, calls=calls, spans=spans)


@pytest.mark.parametrize("step_ms", [5.0, 2000.0])
def test_memory_for_steps_is_bounded(step_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast steps fill the kept minutes; slow steps are kept as far as there is room."""
    keep(monkeypatch, for_ns=2 * S)
    monkeypatch.setattr(history, "_LEAST_BYTES", 50_000)
    monkeypatch.setattr(history, "_LEAST_SPANS_OF_A_RANK", 500)
    monkeypatch.setattr(analysis_module, "_WORST_BYTES", 20_000)
    steps = 25
    late = {(1, step): (StepPhase.DATA, 20.0) for step in range(10, steps, 20)}
    job, analysis = Job(2, steps, step_ms=step_ms, late=late), Analysis(2)
    told, lasts_ns = job.window(), int(job.begins_ns[-1] - job.begins_ns[0])

    def feed(number: int) -> None:
        analysis.add(later(told, number, steps=steps, lasts_ns=lasts_ns))
        analysis.take_fresh()

    assert grown_bytes(feed, few=30, many=80) < FEW_BYTES, "of 1,250 steps"
    found = analysis.summary()
    assert found.steps > 78 * steps and found.ops[0].compared == 80 * steps, "forgotten steps still count"
    assert analysis.worst.blocks and analysis.forgotten > 1_250


def test_without_a_trace_no_collectives_are_kept() -> None:
    job, traced, untraced = Job(2, 1000), Analysis(2), Analysis(2, trace_bytes=0)
    for told in job.windows():
        for analysis in (traced, untraced):
            analysis.add(told)
    assert len(untraced.calls.blocks) == 1 and not untraced.worst.blocks
    assert untraced.summary() == traced.summary(), "all else is the same"


def test_memory_for_recreated_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group has a few calls of two ranks; one rank never reports every tenth group, and something is missing."""
    for module in (matching, analysis_module):
        for name in ("_MOST_GROUPS", "_MOST_KEYS"):
            monkeypatch.setattr(module, name, 20, raising=False)
    monkeypatch.setattr(analysis_module, "_MOST_MISSING", 5)
    keep(monkeypatch, for_ns=0)
    monkeypatch.setattr(history, "_LEAST_BYTES", 0)
    monkeypatch.setattr(history, "_LEAST_SPANS_OF_A_RANK", 10)
    job, analysis = Job(2, 3), Analysis(2)
    told = job.window()

    def feed(number: int) -> None:
        window = later(told, number, steps=3, lasts_ns=30 * S)
        if number % 10 == 0:
            window = replace(window, calls=window.calls[window.calls["rank"] == 0])
        name = f"group {number}"
        total = OpTotal(group=name, op="all_reduce", count=3)
        groups = (GroupMembers(name=name, ranks=(0, 1), backend="gloo"),)
        missing = (f"{name} is gone.",)
        analysis.add(replace(window, groups=groups, totals={0: (total,), 1: (total,)}, missing=missing))
        analysis.take_fresh()

    assert grown_bytes(feed, few=40, many=120) < FEW_BYTES
    found = analysis.summary()
    assert sum(op.count for op in found.ops) == 360, "later groups share one row"
    assert {op.description for op in found.ops} == {"", "later groups"} and len(found.ops) == 21
    assert found.unmatched == 36
    assert found.missing == tuple(f"group {number} is gone." for number in range(5))
