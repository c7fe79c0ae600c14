"""Facts of any kind in words: with units, and nothing of what is not known."""

from typing import Any

import pytest
from incidents import EVALUATE, NOW_NS, WAIT

from lightning_ncclsafe.facts import Action, Collective, HostFacts, Phase, ProcessFacts, StepFacts
from lightning_ncclsafe.report.html.facts import label_of, nothing_in, pairs, table_of, value_words

SHAPES = ((3, 224, 224), ())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rss_bytes", 3_000_000_000, "3.0\u00a0GB"),
        ("memory_growth_bytes_per_s", 47_400, "47.4\u00a0kB/s"),
        ("idle_s", 0.0125, "0.013\u00a0s"),
        ("idle_s", 612.0, "10\u00a0min\u00a012\u00a0s"),
        ("duration_ms", 1.5, "1.500\u00a0ms"),
        ("timeout_ms", 1_800_000, "30\u00a0min"),
        ("taken_ns", NOW_NS, "16:34:41.000"),
        ("taken_ns", 0, ""),
        ("taken_ns", 10**40, "1" + "0" * 40),
        ("pid", 41_234, "41234"),
        ("load_1min", 6.61474609375, "6.615"),
        ("gil_held", False, "no"),
        ("gil_held", None, ""),
        ("phase", Phase.TRAIN, "train"),
        ("ranks", (0, 1, 2, 7), "0-2, 7"),
        ("ranks", (), ""),
        ("input_sizes", SHAPES, "3 \u00d7 224 \u00d7 224, 1"),
        ("passes", ((0, 0, 1), (0, 1, 1)), "0, 0, 1; 0, 1, 1"),
        ("dtypes", ("Float", "Long"), "Float, Long"),
        ("actions", (Action(name="fit", for_s=12.0),), "fit, for 12\u00a0s"),
        ("versions", {"torch": "2.13.0"}, "torch=2.13.0"),
        ("stack", EVALUATE[1:], "model.py:93 in evaluate"),
        ("message", "x" * 5_000, "x" * 1_999 + "…"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_values_are_formatted(name: str, value: Any, words: str) -> None:
    assert value_words(name, value) == words


def test_a_long_stack_shows_its_innermost_frames() -> None:
    words = value_words("stack", (*EVALUATE, *WAIT))
    assert words.startswith("distributed_c10d.py:3256 in all_reduce ← c10d_logger.py:83") and words.endswith("← 1 more")


def test_a_long_list_shows_its_first_items() -> None:
    assert value_words("cpus", tuple(range(100))).endswith("38, 39, … 60 more")


def test_labels_have_no_units() -> None:
    names = ("memory_total_bytes", "swap_growth_bytes_per_s", "idle_s", "created_ns", "power_w", "load_1min")
    assert [*map(label_of, names)] == ["memory total", "swap growth", "idle", "created", "power", "load 1min"]


def test_unknown_values_are_omitted() -> None:
    assert [(label, words) for label, _, words in pairs(HostFacts(cores=2))] == [("cores", "2")]


def test_a_number_that_stands_for_none_is_not_shown() -> None:
    steps = StepFacts(with_backward=4, skipped_batch=-1, skipped_epoch=2)
    shown = {label: words for label, _, words in pairs(steps)}
    assert shown["skipped epoch"] == "2" and "-1" not in shown.values() and "skipped batch" not in shown
    titles, rows = table_of((ProcessFacts(pid=1, state="gone"), ProcessFacts(pid=2, state="gone", rank=3)))
    assert [row[titles.index("rank")] for row in rows] == ["", "3"]


def test_a_table_has_no_empty_columns() -> None:
    calls = (Collective(group="0", seq=1, op="barrier"), Collective(group="0", seq=2, op="barrier"))
    titles, rows = table_of(calls, frozenset({"group", "is_p2p"}))
    assert titles == ["seq", "op", "completed", "started", "launching", "gave up", "timeout"]
    assert rows[1] == ["2", "barrier", "no", "no", "no", "no", "0.000\u00a0ms"]


def test_columns_of_zeros_are_omitted() -> None:
    workers = (ProcessFacts(pid=1, state="sleeping"), ProcessFacts(pid=2, state="sleeping", gil_held=True))
    assert {"swap_bytes", "stack", "cpu_s"} <= nothing_in(workers)
    assert not {"pid", "state", "gil_held", "rank"} & nothing_in(workers)
