"""A straggler in one sentence."""

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.report.safe import safe
from lightning_ncclsafe.report.times import long_words, share_words, time_words
from lightning_ncclsafe.timing.step_phases import StepPhase


def straggler_sentence(straggler: Straggler) -> str:
    """``"rank 5 was last in 94 % of the last 200 steps, 38 ms late on average, in data loading"``."""
    if straggler.is_over:
        lasted_s = (straggler.until_ns - straggler.since_ns) / 1e9
        return f"rank {straggler.rank} is no longer late (was for {long_words(lasted_s)})"
    return safe(
        f"rank {straggler.rank} was last in {share_words(straggler.share)} of the last {straggler.of_steps:,} steps, "
        f"{time_words(straggler.mean_s)} late on average"
        + _where(straggler.phase)
        + (f", mostly at {straggler.op}" if straggler.op else "")
    )


def _where(phase: str) -> str:
    if not phase:
        return ""
    return f", {phase}" if phase == StepPhase.OTHER.value else f", in {phase}"
