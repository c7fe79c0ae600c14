"""How epochs end, from what all ranks present of their loaders."""

from typing import Any

import pytest

from lightning_ncclsafe.facts import DataFacts, EpochEnd, LoaderFacts
from lightning_ncclsafe.loaders.agreement import epoch_ends

LISTED = LoaderFacts(length=4, batches=4)
STREAM = LoaderFacts(iterable=True)
SIZED_STREAM = LoaderFacts(iterable=True, length=4, batches=4)


def end(*loaders: LoaderFacts, on_uneven: str = "raise") -> EpochEnd:
    (found,) = epoch_ends(DataFacts(stage="train_dataloader", loaders=(its,), on_uneven=on_uneven) for its in loaders)
    return found


def of(length: int) -> LoaderFacts:
    return LoaderFacts(length=length, batches=length)


def test_equal_known_lengths_change_nothing() -> None:
    assert end(LISTED, LISTED, LISTED) == EpochEnd()
    assert end(LISTED, LISTED).changes_nothing


def test_unknown_lengths_are_voted_on() -> None:
    assert end(STREAM, STREAM) == EpochEnd(votes=True)
    assert end(LoaderFacts(), LoaderFacts()) == EpochEnd(votes=True), "a batch sampler without a length"


@pytest.mark.parametrize(("workers", "looks_ahead"), [((2, 2), True), ((2, 0), False), ((0, 0), False)])
def test_look_ahead_needs_workers_on_all_ranks(workers: tuple[int, ...], looks_ahead: bool) -> None:
    """Batches made in the main process may depend on the training so far."""
    streams = [LoaderFacts(iterable=True, num_workers=count, made_by_workers=count > 0) for count in workers]
    assert end(*streams) == EpochEnd(votes=True, looks_ahead=looks_ahead)


def test_a_length_claimed_by_all_iterables_is_believed() -> None:
    assert end(SIZED_STREAM, SIZED_STREAM) == EpochEnd()


def test_different_claimed_lengths_are_voted_on() -> None:
    other = LoaderFacts(iterable=True, length=6, batches=6)
    assert end(SIZED_STREAM, other) == EpochEnd(votes=True, hides_length=True)
    assert end(SIZED_STREAM, other, on_uneven="stop_together") == EpochEnd(votes=True, length=4)
    assert end(SIZED_STREAM, other, on_uneven="repeat") == EpochEnd(votes=True, length=6)


def test_a_length_known_to_some_ranks_only_is_hidden() -> None:
    for on_uneven in ("raise", "stop_together", "repeat"):
        assert end(SIZED_STREAM, STREAM, on_uneven=on_uneven) == EpochEnd(votes=True, hides_length=True)
        assert end(LISTED, STREAM, on_uneven=on_uneven) == EpochEnd(votes=True, hides_length=True)


def test_ranks_predict_independently() -> None:
    ranks = [DataFacts(stage="predict_dataloader", loaders=(of(count), STREAM)) for count in (3, 5)]
    assert epoch_ends(ranks) == (EpochEnd(), EpochEnd())


def test_ranks_with_a_sharded_model_predict_together() -> None:
    ranks = [
        DataFacts(stage="predict_dataloader", loaders=(of(count), STREAM), forward_communicates=True)
        for count in (3, 5)
    ]
    assert epoch_ends(ranks) == (EpochEnd(length=4, ends_at=3, lengths=(3, 5)), EpochEnd(votes=True))


@pytest.mark.parametrize("stage", ["val_dataloader", "test_dataloader"])
def test_by_default_each_rank_evaluates_on_its_own(stage: str) -> None:
    def at_end(*loaders: LoaderFacts, **settings: Any) -> EpochEnd:
        return epoch_ends([DataFacts(stage=stage, loaders=(one,), **settings) for one in loaders])[0]

    assert at_end(of(3), of(5), on_mismatch="raise_on_hang") == EpochEnd()
    stops = EpochEnd(length=4, ends_at=3, lengths=(3, 5))
    assert at_end(of(3), of(5), on_mismatch="raise_on_hang", forward_communicates=True) == stops
    assert at_end(of(3), of(5)) == stops
    assert at_end(of(5), of(0), on_mismatch="raise_on_hang").ends_at == 0, "Lightning raises there"
    together = at_end(of(3), of(5), on_mismatch="raise_on_hang", on_uneven="stop_together")
    assert together == EpochEnd(length=3)
    assert at_end(of(3), STREAM, on_mismatch="raise_on_hang").votes
    assert at_end(STREAM, STREAM, on_mismatch="raise_on_hang") == EpochEnd(votes=True, ends_independently=True)
    assert at_end(STREAM, STREAM) == EpochEnd(votes=True)
    assert at_end(STREAM, STREAM, on_mismatch="raise_on_hang", forward_communicates=True) == EpochEnd(votes=True)


@pytest.mark.parametrize(
    ("on_uneven", "expected"),
    [
        ("stop_together", EpochEnd(length=3)),
        ("repeat", EpochEnd(length=5)),
        ("raise", EpochEnd(length=4, ends_at=3, lengths=(5, 3, 4))),
    ],
)
def test_unequal_known_lengths_become_one(on_uneven: str, expected: EpochEnd) -> None:
    assert end(of(5), of(3), of(4), on_uneven=on_uneven) == expected


def test_every_loader_has_its_own_epoch_end() -> None:
    ranks = [DataFacts(stage="val_dataloader", loaders=(STREAM, LISTED)) for _ in range(3)]
    assert epoch_ends(ranks) == (EpochEnd(votes=True), EpochEnd())


def test_different_loader_counts_have_no_epoch_end() -> None:
    assert epoch_ends([DataFacts(stage="val_dataloader", loaders=(LISTED,)), DataFacts(stage="val_dataloader")]) == ()
    assert epoch_ends([]) == ()


def test_loaders_that_still_end_together_are_left_alone() -> None:
    """Shorter loaders cycle while the longest is read; beside a stream, the number of cycles is unknown."""

    def rank(short: int, *more: LoaderFacts) -> DataFacts:
        return DataFacts(stage="train_dataloader", mode="max_size_cycle", loaders=(of(6), of(short), *more))

    assert epoch_ends([rank(2), rank(3)]) == (EpochEnd(), EpochEnd())
    assert epoch_ends([rank(2, STREAM), rank(3, STREAM)])[1] == EpochEnd(length=3, ends_at=2, lengths=(2, 3))


def test_lengths_equalised_by_a_limit_are_left_alone() -> None:
    assert end(LoaderFacts(length=5, batches=3), LoaderFacts(length=4, batches=3)) == EpochEnd()
