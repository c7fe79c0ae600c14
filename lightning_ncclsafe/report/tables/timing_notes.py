"""What is to be known about the numbers of a table of times: what was not measured, or not for certain."""

from collections.abc import Iterator

from lightning_ncclsafe.report.times import time_words
from lightning_ncclsafe.timing.summary import TimingSummary

NOTHING = "–"  # noqa: RUF001 - a dash where a number would stand
_MOST_SENTENCES = 8


def timing_notes(summary: TimingSummary) -> Iterator[str]:
    """A sentence each on durations, clocks, and whatever is not in the numbers."""
    silent = sorted({op.backend or "the back end" for op in summary.ops if op.transfer_s is None and op.count})
    if silent:
        yield f"{NOTHING}: {', '.join(silent)} gave no durations, so what was transfer cannot be told."
    if "nccl" in silent:
        yield "nccl gives them with TORCH_NCCL_ENABLE_TIMING=1 in the environment of all ranks."
    yield from _clock_notes([rank.clock.uncertainty_ns for rank in summary.ranks])
    if summary.lost:
        yield f"{summary.lost:,} calls are missing: the recorder had forgotten them before they were read."
    if summary.left_out:
        yield f"{summary.left_out:,} calls were counted and not compared: there were too many at a time."
    if summary.unmatched:
        yield f"{summary.unmatched:,} calls were not compared: not all members of their groups have told of them."
    yield from summary.missing[:_MOST_SENTENCES]
    if len(summary.missing) > _MOST_SENTENCES:
        yield f"… {len(summary.missing) - _MOST_SENTENCES:,} more sentences about what is missing"


def _clock_notes(uncertainty_ns: list[int]) -> Iterator[str]:
    worst_ns, unknown = max(uncertainty_ns, default=0), sum(value < 0 for value in uncertainty_ns)
    if worst_ns > 0:
        yield f"clocks: hosts aligned to ±{time_words(worst_ns / 1e9)}; lateness below that is not claimed."
    if unknown:
        ranks = "1 rank" if unknown == 1 else f"{unknown:,} ranks"
        yield f"clocks: {ranks} not aligned with rank 0; no lateness is claimed there."
