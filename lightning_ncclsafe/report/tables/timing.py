"""Tables of collectives, ranks and stragglers for a terminal, with notes on what the numbers do not cover."""

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from lightning_ncclsafe.facts.wording import capitalised, size_words
from lightning_ncclsafe.report.lines import cut, safe
from lightning_ncclsafe.report.times import bandwidth_words, share_words, straggler_sentence, time_words
from lightning_ncclsafe.timing.stragglers import LEAST_STEPS
from lightning_ncclsafe.timing.summary import OpSummary, RankSummary, TimingSummary

_MOST_OPS = 16
_FEW_RANKS = 12
_COSTLIEST_RANKS = 8

_OP_COLUMNS = ("group", "operation", "ranks", "calls", "size", "skew", "wait", "transfer", "busbw GB/s")
_RANK_COLUMNS = ("rank", "late in", "late by", "cost", "of the time", "mostly", "waited")
_WORDS = frozenset({"group", "operation", "rank", "mostly"})

Row = tuple[str, ...]

NOTHING = "–"  # noqa: RUF001 - a dash where a number would stand
_MOST_SENTENCES = 8


def render_timing(summary: TimingSummary, width: int = 110) -> str:
    """Stragglers in a sentence each, a table of operations, one of ranks, and notes on both.

    With too few steps to name a straggler, the table of ranks is left out.
    """
    parts = [
        "\n".join(_folded(_verdict(summary), width)),
        _table(_OP_COLUMNS, list(_op_rows(summary.ops)), width),
        _table(_RANK_COLUMNS, list(_rank_rows(summary)) if summary.steps >= LEAST_STEPS else [], width),
        "\n".join(_folded(timing_notes(summary), width)),
    ]
    return "\n\n".join(part for part in parts if part)


def _verdict(summary: TimingSummary) -> Iterator[str]:
    if summary.stragglers:
        yield from (capitalised(straggler_sentence(straggler)) + "." for straggler in summary.stragglers)
    elif 0 < summary.steps < LEAST_STEPS:
        yield f"{summary.steps} steps were compared; stragglers are named after {LEAST_STEPS} or more."
    elif summary.steps:
        yield f"No rank kept the others waiting repeatedly in {summary.steps:,} compared steps."
    else:
        yield "No steps could be compared among the ranks."


def _op_rows(ops: Sequence[OpSummary]) -> Iterator[Row]:
    for op in ops[:_MOST_OPS]:
        yield (
            safe(op.description or op.group),
            safe(op.op),
            f"{op.ranks:,}",
            f"{op.count:,}",
            size_words(round(op.size_bytes)),
            time_words(op.skew_s) if op.compared else NOTHING,
            time_words(op.wait_s) if op.compared else NOTHING,
            NOTHING if op.transfer_s is None else time_words(op.transfer_s),
            NOTHING if op.bus_bandwidth is None else bandwidth_words(op.bus_bandwidth),
        )
    if len(ops) > _MOST_OPS:
        yield (f"… {len(ops) - _MOST_OPS:,} more", *[""] * (len(_OP_COLUMNS) - 1))


def _rank_rows(summary: TimingSummary) -> Iterator[Row]:
    """All ranks if they are few; else those that cost the most, and the worst of the others in one row."""
    lasted_s = max(summary.ended_ns - summary.began_ns, 0) / 1e9
    shown, others = list(summary.ranks), list[RankSummary]()
    if len(shown) > _FEW_RANKS:
        # The sort is stable: ranks with equal cost stay in their order.
        shown.sort(key=lambda rank: -rank.late_s)
        shown, others = shown[:_COSTLIEST_RANKS], shown[_COSTLIEST_RANKS:]
    yield from (_rank_row(rank, lasted_s) for rank in shown)
    if others:
        # All columns but the rank, the phase and its own waiting are those of the worst of them.
        yield (
            f"{len(others):,} others: at most",
            share_words(max(map(_late_share, others))),
            time_words(max(map(_late_by_s, others))),
            time_words(max(rank.late_s for rank in others)),
            _share_of_time(max(rank.late_s for rank in others), lasted_s),
            "",
            time_words(max(rank.waited_s for rank in others)),
        )


def _rank_row(rank: RankSummary, lasted_s: float) -> Row:
    phase = max(rank.by_phase_s, key=lambda phase: rank.by_phase_s[phase], default=None)
    return (
        str(rank.rank),
        f"{share_words(_late_share(rank))} of steps" if rank.steps else NOTHING,
        time_words(_late_by_s(rank)) if rank.late_steps else NOTHING,
        time_words(rank.late_s),
        _share_of_time(rank.late_s, lasted_s),
        NOTHING if phase is None or not rank.late_s else phase.value,
        time_words(rank.waited_s),
    )


def _late_share(rank: RankSummary) -> float:
    return rank.late_steps / rank.steps if rank.steps else 0.0


def _late_by_s(rank: RankSummary) -> float:
    return rank.late_s / rank.late_steps if rank.late_steps else 0.0


def _share_of_time(seconds: float, lasted_s: float) -> str:
    return share_words(seconds / lasted_s) if lasted_s else NOTHING


def _table(columns: Sequence[str], rows: list[Row], width: int) -> str:
    """Renders with rich, which only makes the text: printing to a broken pipe, it would end the program."""
    if not rows:
        return ""
    # Imported when there is something to show: judging alone does not need rich.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="", show_edge=False)
    for column in columns:
        is_words = column in _WORDS
        table.add_column(column, justify="left" if is_words else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        # As Text, so that nothing is taken for markup.
        table.add_row(*map(Text, row))
    made = io.StringIO()
    Console(file=made, width=width, force_terminal=False, force_jupyter=False, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in made.getvalue().rstrip().splitlines())


def _folded(lines: Iterable[str], width: int) -> Iterator[str]:
    for line in lines:
        yield textwrap.fill(cut(safe(line)), width, break_long_words=False, break_on_hyphens=False)


def timing_notes(summary: TimingSummary) -> Iterator[str]:
    """One sentence each on durations, clocks, and what the numbers do not cover."""
    silent = sorted({op.backend or "the back end" for op in summary.ops if op.transfer_s is None and op.count})
    if silent:
        yield f"{NOTHING}: {', '.join(silent)} gave no durations, so transfer time is unknown."
    if "nccl" in silent:
        yield "nccl records them with TORCH_NCCL_ENABLE_TIMING=1 in the environment of all ranks."
    yield from _clock_notes([rank.clock.uncertainty_ns for rank in summary.ranks])
    if summary.lost:
        yield f"{summary.lost:,} calls are missing: the recorder overwrote them before they were read."
    if summary.left_out:
        yield f"{summary.left_out:,} calls were counted but not compared: there were too many at once."
    if summary.unmatched:
        yield f"{summary.unmatched:,} calls were not compared: not all members of their groups reported them."
    yield from summary.missing[:_MOST_SENTENCES]
    if len(summary.missing) > _MOST_SENTENCES:
        yield f"… {len(summary.missing) - _MOST_SENTENCES:,} more sentences about what is missing"


def _clock_notes(uncertainty_ns: list[int]) -> Iterator[str]:
    worst_ns, unknown = max(uncertainty_ns, default=0), sum(value < 0 for value in uncertainty_ns)
    if worst_ns > 0:
        yield f"clocks: hosts aligned to ±{time_words(worst_ns / 1e9)}; smaller lateness is not reported."
    if unknown:
        ranks = "1 rank" if unknown == 1 else f"{unknown:,} ranks"
        yield f"clocks: {ranks} not aligned with rank 0; no lateness is reported for them."
