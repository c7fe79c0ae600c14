"""Ranks that disagree about their data do not start, and uneven data does not hang: whole Trainers, three ranks.

All cases are trained one after the other in the same three processes: to start them takes longer than any case.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from warm import Warm, ranks_of

CASES = Path(__file__).with_name("data_cases.py")
RANKS = 3
LIMIT_S = 150
# Of the first call of a case's fixture, which runs all of them.

Outcomes = dict[str, list[dict[str, Any]]]


def run(warm: Warm, folder: Path) -> Outcomes:
    """What became of each case, by rank."""
    envs = [rank | {"OMP_NUM_THREADS": "1"} for rank in ranks_of(RANKS)]
    codes, printed = warm.run([str(CASES), f"--folder={folder}"], folder, timeout_s=LIMIT_S, envs=envs)
    results = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    by_rank = [json.loads(result.read_text()) if result.exists() else {} for result in results]
    assert not any(codes), f"exit codes {codes}, after {list(by_rank[0])}:\n{printed[-8000:]}"
    outcomes: Outcomes = {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
    return outcomes | {"printed": [{"text": printed}]}


@pytest.fixture(scope="module")
def outcomes(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(warm, tmp_path_factory.mktemp("data"))


def batches(rank: int, *numbers: int) -> list[list[float]]:
    """Batches of a rank's own numbers."""
    return [[100 * rank + 2 * number, 100 * rank + 2 * number + 1] for number in numbers]


def all_raised(outcome: list[dict[str, Any]], error: str, rule: str) -> str:
    """What all ranks have raised, without its last line: where the report is."""
    assert {of_rank["raised"] for of_rank in outcome} == {error}, outcome
    assert {of_rank["finding"] for of_rank in outcome} == {rule}
    assert outcome[0]["reports"], "rank 0 writes the report"
    (text,) = {of_rank["text"].partition("\nThe report is in ")[0] for of_rank in outcome}
    return " ".join(str(text).split())


def assert_healthy(outcome: list[dict[str, Any]]) -> None:
    assert [of_rank["raised"] for of_rank in outcome] == [""] * RANKS, outcome[0]["text"]
    assert all(of_rank["reports"] == [] for of_rank in outcome)
    assert len({of_rank["steps"] for of_rank in outcome}) == 1


# Uneven ends, of streams of 5, 3 and 4 batches.


def test_raise_stops_all_ranks_before_the_same_batch_and_names_the_short_one(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["raise"], "UnevenDataError", "uneven-batches")
    assert "The train_dataloader has ended on rank 1 after 3 batches, while ranks 0, 2 have had 4" in text
    for rank, outcome in enumerate(outcomes["raise"]):
        assert outcome["trained"] == batches(rank, 0, 1), "the vote is one batch ahead of Lightning, which is one ahead"


@pytest.mark.parametrize("case", ["stop-together", "workers"])
def test_stop_together_trains_on_the_shortest_length(outcomes: Outcomes, case: str) -> None:
    for rank, outcome in enumerate(outcomes[case]):
        assert outcome["raised"] == ""
        assert outcome["trained"] == batches(rank, 0, 1, 2) * 2, "two epochs"
        assert (outcome["steps"], outcome["epochs"]) == (6, 2)


def test_repeat_trains_on_the_longest_length(outcomes: Outcomes) -> None:
    orders = ((0, 1, 2, 3, 4), (0, 1, 2, 0, 1), (0, 1, 2, 3, 0))
    for rank, outcome in enumerate(outcomes["repeat"]):
        assert outcome["trained"] == batches(rank, *orders[rank]) * 2
        assert (outcome["steps"], outcome["epochs"]) == (10, 2)


def test_accumulation_and_validation_are_equal_on_all_ranks(outcomes: Outcomes) -> None:
    for case, steps, validated in (("stop-together", 4, 2), ("repeat", 6, 4)):
        for outcome in outcomes[f"{case}-accumulated"]:
            assert outcome["raised"] == ""
            assert outcome["steps"] == steps, "two epochs, each with a last step on an odd batch"
            sanity_check = 2
            assert len(outcome["evaluated"]) == sanity_check + 2 * validated


def test_the_second_of_two_validation_streams_ends_unevenly(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["uneven-validation"], "UnevenDataError", "uneven-batches")
    assert "The val_dataloader[1] has ended on rank 1 after 3 batches" in text
    for rank, outcome in enumerate(outcomes["uneven-validation"]):
        assert outcome["steps"] == 2
        assert outcome["evaluated"] == batches(rank, 0, 1, 0, 1), "the first whole, of the second all but one"


def test_without_the_callback_ranks_validate_their_whole_streams(outcomes: Outcomes) -> None:
    """As in stock: no collective runs per batch, and logged values are reduced at the end."""
    for rank, outcome in enumerate(outcomes["uneven-validation-alone"]):
        assert outcome["raised"] == ""
        assert outcome["evaluated"][:2] == batches(rank, 0, 1)
        assert len(outcome["evaluated"]) == 2 + (5, 3, 4)[rank]


def test_different_claimed_lengths_are_cut_to_the_shortest(outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes["claimed-lengths"]):
        assert (outcome["raised"], outcome["trained"]) == ("", batches(rank, 0, 1)), "0.7 of 3"


def test_each_rank_predicts_its_whole_shard(outcomes: Outcomes) -> None:
    for rank, outcome in enumerate(outcomes["predict-shards"]):
        assert outcome["raised"] == ""
        assert outcome["evaluated"] == batches(rank, *range((5, 3, 4)[rank])) * 2


def test_combined_loaders_end_together(outcomes: Outcomes) -> None:
    """A stream of 5, 3 and 4 batches, beside a list of 4, 2 and 5 that cycles."""
    for rank, outcome in enumerate(outcomes["combined"]):
        assert (outcome["raised"], outcome["trained"]) == ("", batches(rank, 0, 1, 2))


# The same where the lengths are known.


def test_unequal_known_lengths_do_not_start(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["known-raise"], "DatasetMismatchError", "uneven-batches")
    assert "5 batches on rank 0, 3 batches on rank 1, 4 batches on rank 2" in text
    assert all(outcome["steps"] == 0 for outcome in outcomes["known-raise"])


def test_unequal_known_lengths_follow_the_policy(outcomes: Outcomes) -> None:
    repeated = ((0, 1, 2, 3, 4), (0, 1, 2, 0, 1), (0, 1, 2, 3, 0))
    for rank in range(RANKS):
        assert outcomes["known-stop-together"][rank]["trained"] == batches(rank, 0, 1, 2) * 2
        assert outcomes["known-repeat"][rank]["trained"] == batches(rank, *repeated[rank]) * 2


def test_warned_ranks_stop_at_the_first_end(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["known-warn"], "UnevenDataError", "uneven-batches")
    assert "has ended on rank 1 after 3 batches" in text
    for rank, outcome in enumerate(outcomes["known-warn"]):
        assert outcome["trained"] == batches(rank, 0, 1, 2)
    assert "[ncclsafe] uneven-batches: " in outcomes["printed"][0]["text"]


def test_a_length_known_to_some_ranks_only_is_reported(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["half-sized"], "DatasetMismatchError", "sized-and-unsized")
    assert "no length (Stream) on rank 1" in text
    for rank, outcome in enumerate(outcomes["half-sized-warn"]):
        assert (outcome["raised"], outcome["trained"]) == ("", batches(rank, 0, 1, 2))


# Ranks that disagree.


def test_an_unseeded_split_does_not_start(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["unseeded-split"], "DatasetMismatchError", "different-data")
    assert "numpy" in text
    assert len(set(re.findall(r"indices:[0-9a-f]{8}", text))) == RANKS, "a fingerprint for each"
    assert all(outcome["steps"] == 0 for outcome in outcomes["unseeded-split"])


def test_an_unseeded_split_trains_if_allowed(outcomes: Outcomes) -> None:
    for case in ("unseeded-split-alone", "unseeded-split-warn", "unseeded-split-off"):
        assert all((outcome["raised"], outcome["steps"]) == ("", 2) for outcome in outcomes[case])
    assert outcomes["printed"][0]["text"].count("[ncclsafe] different-data: ") == 2
    assert len(outcomes["unseeded-split-warn"][0]["reports"]) == 1
    # Nothing hangs, and nobody has asked for a comparison.
    assert outcomes["unseeded-split-alone"][0]["reports"] == []
    assert outcomes["unseeded-split-off"][0]["reports"] == []


def test_different_numbers_of_loaders_do_not_start(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["different-number"], "DatasetMismatchError", "loader-count")
    assert "the number of loaders in val_dataloader is 1 on ranks 0, 2 but 2 on rank 1" in text


def test_ranks_with_the_same_stream_do_not_start(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["same-stream"], "DatasetMismatchError", "same-shard")
    assert "Every rank reads the same data of the train_dataloader." in text
    assert "DistributedSampler" not in text
    assert all(outcome["trained"] == [] for outcome in outcomes["same-stream"])


def test_ranks_with_the_same_stream_are_only_warned_without_the_callback(outcomes: Outcomes) -> None:
    for outcome in outcomes["same-stream-alone"]:
        assert (outcome["raised"], outcome["steps"]) == ("", 4)
    assert outcomes["printed"][0]["text"].count("[ncclsafe] same-shard: ") == 1


def test_recreated_loaders_are_compared_again(outcomes: Outcomes) -> None:
    all_raised(outcomes["reloaded"], "DatasetMismatchError", "uneven-batches")
    assert all((outcome["steps"], outcome["epochs"]) == (3, 1) for outcome in outcomes["reloaded"])


def test_ranks_with_different_validation_steps_do_not_start(outcomes: Outcomes) -> None:
    all_raised(outcomes["validates-elsewhere"], "DatasetMismatchError", "different-trainer-settings")
    assert all(outcome["trained"] == [] for outcome in outcomes["validates-elsewhere"])


def test_an_unreadable_length_is_reported(outcomes: Outcomes) -> None:
    text = all_raised(outcomes["odd-length"], "DatasetMismatchError", "unreadable-loader")
    assert "ValueError: nobody has counted" in text


# What must not be refused.


@pytest.mark.parametrize(
    "case",
    [
        "shuffled-and-padded",
        "augmented",
        "sharded",
        "whole-validation",
        "own-sampler",
        "overfitted",
        "fast-dev-run",
        "resumed",
        "validate",
        "test",
        "predict",
        "odd-loaders",
        "same-object",
        "user-looks",
    ],
)
def test_healthy_data_is_trained_on(outcomes: Outcomes, case: str) -> None:
    assert_healthy(outcomes[case])
    assert all(outcome["trained"] or outcome["evaluated"] for outcome in outcomes[case])


def test_padded_shares_match_stock(outcomes: Outcomes) -> None:
    seen = [number for outcome in outcomes["validate"] for batch in outcome["evaluated"][:2] for number in batch]
    assert sorted(seen) == list(range(12))


def test_an_internal_failure_is_printed_and_training_continues(outcomes: Outcomes) -> None:
    assert_healthy(outcomes["blind-rank"])
    said = [line for line in outcomes["printed"][0]["text"].splitlines() if "failed and is off" in line]
    assert len(said) == 1, "by one rank, for the first of two stages of one case, and in no other case"
    assert "the comparison of the ranks' data" in said[0]
    assert "our own fault" in said[0]


def test_loaders_are_restored_afterwards(outcomes: Outcomes) -> None:
    types = {name for of_ranks in outcomes.values() for outcome in of_ranks for name in outcome.get("types", ())}
    assert types == {"DataLoader", "OddLength", "CombinedLoader", "Data", "list", "Batches"}
    left = [outcome["left"] for of_ranks in outcomes.values() for outcome in of_ranks if "left" in outcome]
    assert left and not any(left)
