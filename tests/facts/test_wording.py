"""Numbers, ranks and places in words."""

import pytest

from lightning_ncclsafe.facts import Collective, Frame
from lightning_ncclsafe.facts.wording import (
    apart_words,
    call_words,
    collective_words,
    condition_words,
    duration_words,
    encloses_words,
    group_words,
    ranks_words,
    size_words,
    under_words,
)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), "no rank"),
        ((3,), "rank 3"),
        ((7, 1, 2, 3, 3), "ranks 1-3, 7"),
        (range(1024), "ranks 0-1023"),
        (range(0, 100, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, … (50 ranks)"),
    ],
)
def test_ranks(ranks: tuple[int, ...], words: str) -> None:
    assert ranks_words(ranks) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0.0 s"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (252, "4 min 12 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration_words(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(512, "512 bytes"), (12_300_000_000, "12.3 GB"), (1_500, "1.5 kB"), (2 * 10**12, "2.0 TB")]
)
def test_sizes(count: int, words: str) -> None:
    assert size_words(count) == words


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["3 on ranks 0, 2", "4 on rank 1"], "3 on ranks 0, 2 but 4 on rank 1"),
        (["3 on ranks 0, 2", "4 on rank 1", "5 on rank 3"], "3 on ranks 0, 2; 4 on rank 1; 5 on rank 3"),
        (["3 on rank 0", "4 on rank 1", "5 on rank 2"], "3 on rank 0, 4 on rank 1, 5 on rank 2"),
    ],
)
def test_no_value_is_taken_for_a_rank(parts: list[str], words: str) -> None:
    assert apart_words(parts) == words


def test_collectives() -> None:
    one = Collective(group="0", seq=345, op="broadcast", input_sizes=((1,),), dtypes=("Long",))
    assert collective_words(one) == "broadcast (sequence number 345, 1 element of Long)"
    assert collective_words(one, "the vote") == "the vote (broadcast, sequence number 345, 1 element of Long)"
    sub = Collective(group="tp", seq=2, op="_allgather_base", output_sizes=((1024, 2), (2,)))
    assert collective_words(sub) == "_allgather_base (sequence number 2, 2,050 elements, group 'tp')"


def test_calls_and_groups() -> None:
    assert (
        call_words(Collective(group="0", seq=4, op="all_reduce", input_sizes=((5, 2),))) == "all_reduce (10 elements)"
    )
    assert call_words(Collective(group="0", seq=4, op="barrier")) == "barrier"
    assert (group_words("0"), group_words("tp")) == ("the default group", "group 'tp'")
    assert (group_words("0", "default_pg"), group_words("7", "tp:split:0")) == (
        "the default group",
        "group '7' (tp:split:0)",
    )
    assert (group_words("0:gloo"), group_words("0:gloo", "default_pg:gloo")) == ("the default group (gloo)",) * 2
    assert group_words("7:gloo", "tp:split:0:gloo") == "group '7' (tp:split:0, gloo)"


def test_conditions() -> None:
    assert condition_words("if rank == 0:  (line 41)") == "`if rank == 0:` (line 41)"
    assert condition_words("@rank_zero_only") == "`@rank_zero_only`"


def test_a_line_is_under_a_condition_or_past_the_jump_of_the_other_ranks() -> None:
    frame = Frame(file="/a/train.py", line=9, function="evaluate")
    inside, past = "if rank == 0:  (line 4)", "past return under if rank != 0:  (line 4)"
    assert under_words(inside) == "under `if rank == 0:` (line 4)"
    assert encloses_words(inside, frame) == "`if rank == 0:` (line 4) encloses /a/train.py:9 in evaluate."
    assert under_words(past) == "past the `return` under `if rank != 0:` (line 4)"
    kept = "The `return` under `if rank != 0:` (line 4) keeps other ranks from /a/train.py:9 in evaluate."
    assert encloses_words(past, frame) == kept
