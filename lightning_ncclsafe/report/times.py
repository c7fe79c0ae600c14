"""Times, shares and rates in words, sensibly rounded; a straggler in one sentence."""

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.report.lines import safe
from lightning_ncclsafe.timing.summary import StepPhase


def time_words(seconds: float) -> str:
    """``"0.21 ms"``, ``"3.4 ms"``, ``"38 ms"``, ``"1.2 s"``, ``"312 s"``; ``"0 ms"`` for zero."""
    millis = seconds * 1e3
    if abs(millis) < 999.5:
        return f"{_figures(millis)} ms"
    return f"{_figures(seconds)} s"


def _figures(number: float) -> str:
    """Three figures at most, and no more than two decimals."""
    size = abs(number)
    if size == 0:
        return "0"
    if size < 0.005:
        return "<0.01"
    if size < 0.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if size < 9.95 else f"{number:,.0f}"


def long_words(seconds: float) -> str:
    """``"45 s"``, ``"12 min"``, ``"2 h 5 min"``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def share_words(share: float) -> str:
    """``"0 %"``, ``"<1 %"``, ``"94 %"``; ``"100 %"`` only for all of it."""
    if 0 < share < 0.005:
        return "<1 %"
    if 0.995 <= share < 1:
        return ">99 %"
    return f"{share * 100:.0f} %"


def bandwidth_words(bytes_per_s: float) -> str:
    """GB a second, decimal, without the unit: ``"0.08"``, ``"3.4"``, ``"412"``."""
    return _figures(bytes_per_s / 1e9)


def straggler_sentence(straggler: Straggler) -> str:
    """``"rank 5 was last in 94 % of the last 200 steps, 38 ms late on average, in data loading"``."""
    if straggler.is_over:
        lasted_s = (straggler.until_ns - straggler.since_ns) / 1e9
        return f"rank {straggler.rank} is no longer late (was for {long_words(lasted_s)})"
    phase = straggler.phase if straggler.phase in ("", StepPhase.OTHER.value) else f"in {straggler.phase}"
    return safe(
        f"rank {straggler.rank} was last in {share_words(straggler.share)} of the last {straggler.of_steps:,} steps, "
        f"{time_words(straggler.mean_s)} late on average"
        + (f", {phase}" if phase else "")
        + (f", mostly at {straggler.op}" if straggler.op else "")
    )
