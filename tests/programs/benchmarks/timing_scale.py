"""Time and memory of a large job's trace and table: ``python tests/programs/benchmarks/timing_scale.py``.

A synthetic job, 1,024 ranks x 10,000 collectives unless told otherwise, in a process of its own, so that the peak is
that of the work alone.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.report.tables.timing import render_timing
from lightning_ncclsafe.report.trace.collectives import write_trace
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.summary import OpSummary, RankSummary, StepPhase, TimingSummary
from lightning_ncclsafe.timing.windows import SPAN, UNKNOWN_NS, Clock, GroupMembers, Spans

BEGAN_NS = 1_700_000_000_000_000_000
EVERY_NS = 50_000_000
BLOCK = 500
LATE_RANK = 5


def block(ranks: int, first: int, count: int, *, is_timed: bool, random: np.random.Generator) -> MatchedCalls:
    """Collectives one after the other; one rank is late by 5 ms more than noise."""
    seq = np.arange(first, first + count)
    arrival_ns = BEGAN_NS + seq * EVERY_NS + random.integers(0, 2_000_000, (ranks, count))
    arrival_ns[min(LATE_RANK, ranks - 1)] += 5_000_000
    wait_ns = arrival_ns.max(axis=0) - arrival_ns
    return MatchedCalls(
        group=GroupMembers(name="0", description="default_pg", ranks=tuple(range(ranks)), backend="nccl"),
        ops=("all_reduce", "broadcast"),
        op=seq % 10 == 0,
        seq=seq,
        step=seq // 10,
        size_bytes=np.full(count, 25_000_000),
        arrival_ns=arrival_ns,
        duration_ns=wait_ns + 1_000_000 if is_timed else np.full((ranks, count), UNKNOWN_NS),
        uncertainty_ns=np.zeros(ranks, dtype=np.int64),
        before_ns=arrival_ns[:, 0] - EVERY_NS,
        follows=np.arange(count) > 0,
    )


def phases(ranks: int, steps: int) -> Spans:
    spans = np.zeros((ranks, steps, 2), SPAN)
    spans["rank"] = np.arange(ranks)[:, None, None]
    spans["phase"] = [1, 2]
    spans["begin_ns"] = BEGAN_NS + np.arange(steps)[:, None] * 10 * EVERY_NS + np.array([0, EVERY_NS])
    return spans.reshape(-1)


def summary(ranks: int, collectives: int) -> TimingSummary:
    op = OpSummary(group="0", op="all_reduce", ranks=ranks, count=collectives, transfer_s=1e-3)
    told = [
        RankSummary(rank=rank, steps=1000, late_steps=3, late_s=0.01, by_phase_s={StepPhase.DATA: 0.01}, clock=Clock())
        for rank in range(ranks)
    ]
    straggler = Straggler(rank=LATE_RANK, phase="data loading", share=0.9, of_steps=200, mean_s=5e-3, since_ns=BEGAN_NS)
    ended_ns = BEGAN_NS + collectives * EVERY_NS
    return TimingSummary(
        began_ns=BEGAN_NS, ended_ns=ended_ns, steps=1000, ops=(op,), ranks=tuple(told), stragglers=(straggler,)
    )


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def work(ranks: int, collectives: int, is_timed: bool) -> None:
    random = np.random.default_rng(0)
    calls = [
        block(ranks, first, min(BLOCK, collectives - first), is_timed=is_timed, random=random)
        for first in range(0, collectives, BLOCK)
    ]
    spans, told = phases(ranks, collectives // 10), summary(ranks, collectives)
    print(f"{ranks:,} ranks x {collectives:,} collectives, {len(spans):,} phases: {peak_mb():,.0f} MB before")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        events = write_trace(Path(folder) / "trace.json.gz", calls=calls, spans=spans, summary=told)
        traced = time.perf_counter()
        size_mb = (Path(folder) / "trace.json.gz").stat().st_size / 1e6
    render_timing(told)
    done = time.perf_counter()
    print(f"trace: {events:,} events, {size_mb:.1f} MB, {traced - began:.2f} s")
    print(f"table: {done - traced:.2f} s")
    print(f"together: {done - began:.2f} s, peak {peak_mb():,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--collectives", type=int, default=10_000)
    parser.add_argument("--untimed", action="store_true", help="as on gloo, which gives no durations")
    parser.add_argument("--here", action="store_true", help="in this process")
    told = parser.parse_args()
    if told.here:
        work(told.ranks, told.collectives, not told.untimed)
    else:
        subprocess.run([sys.executable, __file__, "--here", *sys.argv[1:]], check=True, timeout=600)


if __name__ == "__main__":
    main()
