"""What people read at the end of a run: numbers with their units, the worst first, and what cannot be claimed."""

from dataclasses import replace

import pytest
import rich.console

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.report.tables.timing import render_timing
from lightning_ncclsafe.report.times import bandwidth_words, long_words, share_words, straggler_sentence, time_words
from lightning_ncclsafe.timing.summary import OpSummary, RankSummary, StepPhase, TimingSummary
from lightning_ncclsafe.timing.windows import Clock

S = 1_000_000_000
HERE = Clock(offset_ns=0, uncertainty_ns=0)
SENTENCE = "rank 5 was last in 94 % of the last 200 steps, 38 ms late on average"
STRAGGLER = Straggler(rank=5, phase="data loading", share=0.94, of_steps=200, mean_s=0.038, op="all_reduce")


def all_reduce(**more: object) -> OpSummary:
    known: dict[str, object] = {
        "group": "0",
        "description": "default_pg",
        "backend": "nccl",
        "op": "all_reduce",
        "ranks": 8,
        "count": 12_000,
        "compared": 12_000,
        "size_bytes": 25_000_000.0,
        "skew_s": 0.0384,
        "wait_s": 0.0312,
        "transfer_s": 0.00214,
        "bus_bandwidth": 41.2e9,
    }
    return OpSummary(**known | more)  # type: ignore[arg-type]


def rank_of(number: int, **more: object) -> RankSummary:
    return RankSummary(**{"rank": number, "steps": 200, "clock": HERE} | more)  # type: ignore[arg-type]


def summary(**more: object) -> TimingSummary:
    known: dict[str, object] = {
        "began_ns": S,
        "ended_ns": 101 * S,
        "steps": 200,
        "ops": (all_reduce(),),
        "ranks": (
            rank_of(0, waited_s=7.1),
            rank_of(
                5, late_steps=188, late_s=7.144, by_phase_s={StepPhase.COMPUTE: 0.1, StepPhase.DATA: 7.0}, waited_s=0.02
            ),
        ),
    }
    return TimingSummary(**known | more)  # type: ignore[arg-type]


def row(text: str, start: str) -> list[str]:
    """The cells of a row, without the spaces between them."""
    found = [line for line in text.splitlines() if line.strip().startswith(start)]
    assert len(found) == 1, text
    return [cell.strip() for cell in found[0].strip().split("  ") if cell.strip()]


def test_an_operation_has_its_units() -> None:
    cells = row(render_timing(summary()), "default_pg")
    assert cells == ["default_pg", "all_reduce", "8", "12,000", "25.0 MB", "38 ms", "31 ms", "2.1 ms", "41"]


def test_a_group_without_a_description_is_named() -> None:
    assert row(render_timing(summary(ops=(all_reduce(description="", group="tp"),))), "tp")[1] == "all_reduce"


def test_missing_durations_are_explained_once() -> None:
    ops = tuple(all_reduce(description=op, backend="gloo", transfer_s=None, bus_bandwidth=None) for op in ("dp", "tp"))
    text = render_timing(summary(ops=ops))
    assert row(text, "dp")[-2:] == row(text, "tp")[-2:] == ["–", "–"]  # noqa: RUF001 - as printed
    assert text.count("gloo gave no durations") == 1
    assert "TORCH_NCCL_ENABLE_TIMING" not in text
    assert "gave no durations" not in render_timing(summary())
    assert "TORCH_NCCL_ENABLE_TIMING=1" in render_timing(summary(ops=(all_reduce(transfer_s=None),)))


def test_an_uncompared_call_has_no_skew() -> None:
    cells = row(render_timing(summary(ops=(all_reduce(compared=0),))), "default_pg")
    assert cells[5:7] == ["–", "–"]  # noqa: RUF001 - as printed


def test_a_rank_is_listed_with_its_cost() -> None:
    text = render_timing(summary())
    assert row(text, "5") == ["5", "94 % of steps", "38 ms", "7.1 s", "7 %", "data loading", "20 ms"]
    assert row(text, "0") == ["0", "0 % of steps", "–", "0 ms", "0 %", "–", "7.1 s"]  # noqa: RUF001 - as printed


def test_the_costliest_ranks_are_listed_and_the_others_summarised() -> None:
    ranks = [rank_of(n, late_steps=2, late_s=0.0004, waited_s=1.5) for n in range(1024)]
    ranks[700] = rank_of(700, late_steps=100, late_s=9.0)
    ranks[3] = rank_of(3, late_steps=10, late_s=0.5)
    text = render_timing(summary(ranks=tuple(ranks)))
    rows = text.split("waited")[1].splitlines()[2:]
    assert [line.split()[0] for line in rows[:4]] == ["700", "3", "0", "1"]
    cells = row(text, "1,016 others: at most")
    assert cells[1:] == ["1 %", "0.20 ms", "0.40 ms", "<1 %", "1.5 s"]
    assert len(text.splitlines()) < 30


def test_few_ranks_stay_in_order() -> None:
    ranks = tuple(rank_of(n, late_steps=1, late_s=float(n)) for n in range(12))
    rows = render_timing(summary(ranks=ranks)).split("waited")[1].splitlines()[2:14]
    assert [int(line.split()[0]) for line in rows] == list(range(12))


def test_a_table_without_stragglers_states_that() -> None:
    assert render_timing(summary()).startswith("No rank kept the others waiting repeatedly in 200 compared")
    assert render_timing(TimingSummary()) == "No steps could be compared among the ranks."


def test_too_few_steps_have_no_rank_table() -> None:
    text = render_timing(replace(summary(), steps=49))
    assert text.startswith("49 steps were compared; stragglers are named after 50 or more.")
    assert "default_pg" in text and "late in" not in text
    assert "late in" in render_timing(replace(summary(), steps=50))


def test_stragglers_come_first() -> None:
    text = render_timing(summary(stragglers=(STRAGGLER,)), width=200)
    assert text.startswith("Rank 5 was last in 94 % of the last 200 steps, 38 ms late on average")
    assert "No rank" not in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {},
            f"{SENTENCE}, in data loading, mostly at all_reduce",
        ),
        ({"op": "", "phase": ""}, SENTENCE),
        (
            {"op": "", "phase": "between hooks"},
            f"{SENTENCE}, between hooks",
        ),
        ({"is_over": True, "since_ns": 9000 * S, "until_ns": 9723 * S}, "rank 5 is no longer late (was for 12 min)"),
    ],
)
def test_a_straggler_is_described_in_a_sentence(more: dict[str, object], said: str) -> None:
    told = {name: getattr(STRAGGLER, name) for name in ("rank", "phase", "share", "of_steps", "mean_s", "op")}
    assert straggler_sentence(Straggler(**told | more)) == said


def test_clocks_are_mentioned_for_different_hosts() -> None:
    apart = (rank_of(0), rank_of(1, clock=Clock(offset_ns=5, uncertainty_ns=210_000)))
    assert "clocks: hosts aligned to ±0.21 ms; smaller lateness is not reported." in render_timing(summary(ranks=apart))
    unknown = (rank_of(0), rank_of(1, clock=Clock()))
    assert "clocks: 1 rank not aligned with rank 0; no lateness is reported for them." in render_timing(
        summary(ranks=unknown)
    )
    assert "clocks:" not in render_timing(summary())


def test_only_missing_data_is_mentioned() -> None:
    text = render_timing(summary(lost=1200, left_out=30, unmatched=7, missing=("no recorder on rank 3",)))
    last = text.split("\n\n")[-1].splitlines()
    assert [line.split()[0] for line in last] == ["1,200", "30", "7", "no"]
    assert "recorder" not in render_timing(summary())


def test_many_missing_messages_are_truncated() -> None:
    text = render_timing(summary(missing=tuple(f"sentence {n}" for n in range(500))))
    assert "… 492 more" in text


def test_no_line_exceeds_the_width() -> None:
    wide = all_reduce(description="a process group with a long description " * 5, op="_reduce_scatter_base" * 4)
    for width in (60, 80, 110, 200):
        text = render_timing(summary(ops=(wide,), stragglers=(STRAGGLER,), missing=("word " * 90,)), width=width)
        assert max(map(len, text.splitlines())) <= width


def test_escape_codes_and_markup_in_names_are_escaped() -> None:
    evil = all_reduce(description="\x1b[2J[bold]tp[/bold]\n\u202e", op="[red]x")
    text = render_timing(summary(ops=(evil,), missing=("\x1b[31m",)), width=200)
    assert "\x1b" not in text and "\u202e" not in text
    assert "[bold]tp[/bold]" in text and "[red]x" in text


def test_many_operations_are_truncated() -> None:
    text = render_timing(summary(ops=tuple(all_reduce(op=f"op{n}") for n in range(40))))
    assert "op15" in text and "op16" not in text and "… 24 more" in text


def test_numbers_are_rounded_sensibly() -> None:
    times = (0, 4e-6, 2.1e-4, 9.94e-4, 9.96e-4, 3.44e-3, 38.4e-3, 0.9994, 0.9996, 1.234, 312.3, 40_000)
    assert [time_words(seconds) for seconds in times] == [
        *("0 ms", "<0.01 ms", "0.21 ms", "0.99 ms", "1.0 ms", "3.4 ms", "38 ms", "999 ms", "1.0 s", "1.2 s"),
        *("312 s", "40,000 s"),
    ]
    assert [share_words(share) for share in (0, 0.001, 0.944, 0.996, 1)] == ["0 %", "<1 %", "94 %", ">99 %", "100 %"]
    assert [long_words(s) for s in (-1, 45.2, 59.7, 723, 3570, 7500)] == [
        *("0 s", "45 s", "1 min", "12 min", "1 h 0 min", "2 h 5 min")
    ]
    assert [bandwidth_words(rate) for rate in (8e7, 3.4e9, 41.2e9)] == ["0.08", "3.4", "41"]


def test_in_a_notebook_the_table_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would show it in the cell, over a connection that forked ranks do not have."""
    elsewhere = render_timing(summary())
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert render_timing(summary()) == elsewhere and "late in" in elsewhere
