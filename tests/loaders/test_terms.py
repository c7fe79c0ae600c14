"""What follows for a loader from what all ranks have presented."""

from typing import Any

import pytest

from lightning_ncclsafe.facts import DataFacts, LoaderFacts, LoaderTerms
from lightning_ncclsafe.loaders.terms import terms_of

LISTED = LoaderFacts(length=4, batches=4)
STREAM = LoaderFacts(iterable=True)
SIZED_STREAM = LoaderFacts(iterable=True, length=4, batches=4)


def terms(*loaders: LoaderFacts, on_uneven: str = "raise") -> LoaderTerms:
    (found,) = terms_of(DataFacts(stage="train_dataloader", loaders=(its,), on_uneven=on_uneven) for its in loaders)
    return found


def of(length: int) -> LoaderFacts:
    return LoaderFacts(length=length, batches=length)


def test_equal_known_lengths_change_nothing() -> None:
    assert terms(LISTED, LISTED, LISTED) == LoaderTerms()
    assert terms(LISTED, LISTED).changes_nothing


def test_unknown_lengths_are_voted_on() -> None:
    assert terms(STREAM, STREAM) == LoaderTerms(votes=True)
    assert terms(LoaderFacts(), LoaderFacts()) == LoaderTerms(votes=True), "a batch sampler without a length"


@pytest.mark.parametrize(("workers", "looks_ahead"), [((2, 2), True), ((2, 0), False), ((0, 0), False)])
def test_only_what_workers_make_on_all_ranks_is_looked_ahead(workers: tuple[int, ...], looks_ahead: bool) -> None:
    """What a rank makes by itself may depend on what has been trained by then."""
    streams = [LoaderFacts(iterable=True, num_workers=count, made_by_workers=count > 0) for count in workers]
    assert terms(*streams) == LoaderTerms(votes=True, looks_ahead=looks_ahead)


def test_a_length_that_all_iterables_claim_is_believed() -> None:
    assert terms(SIZED_STREAM, SIZED_STREAM) == LoaderTerms()


def test_different_claims_are_voted_on() -> None:
    other = LoaderFacts(iterable=True, length=6, batches=6)
    assert terms(SIZED_STREAM, other) == LoaderTerms(votes=True, hides_length=True)
    assert terms(SIZED_STREAM, other, on_uneven="stop_together") == LoaderTerms(votes=True, length=4)
    assert terms(SIZED_STREAM, other, on_uneven="repeat") == LoaderTerms(votes=True, length=6)


def test_a_length_that_only_some_ranks_know_is_hidden() -> None:
    for on_uneven in ("raise", "stop_together", "repeat"):
        assert terms(SIZED_STREAM, STREAM, on_uneven=on_uneven) == LoaderTerms(votes=True, hides_length=True)
        assert terms(LISTED, STREAM, on_uneven=on_uneven) == LoaderTerms(votes=True, hides_length=True)


def test_ranks_predict_each_for_itself() -> None:
    ranks = [DataFacts(stage="predict_dataloader", loaders=(of(count), STREAM)) for count in (3, 5)]
    assert terms_of(ranks) == (LoaderTerms(), LoaderTerms())


def test_ranks_among_which_the_model_is_split_predict_together() -> None:
    ranks = [
        DataFacts(stage="predict_dataloader", loaders=(of(count), STREAM), forward_communicates=True)
        for count in (3, 5)
    ]
    assert terms_of(ranks) == (LoaderTerms(length=4, ends_at=3, lengths=(3, 5)), LoaderTerms(votes=True))


@pytest.mark.parametrize("stage", ["val_dataloader", "test_dataloader"])
def test_ranks_evaluate_each_for_itself_where_nobody_has_set_anything(stage: str) -> None:
    def at_end(*loaders: LoaderFacts, **settings: Any) -> LoaderTerms:
        return terms_of([DataFacts(stage=stage, loaders=(one,), **settings) for one in loaders])[0]

    assert at_end(of(3), of(5), on_mismatch="raise_on_hang") == LoaderTerms()
    stops = LoaderTerms(length=4, ends_at=3, lengths=(3, 5))
    assert at_end(of(3), of(5), on_mismatch="raise_on_hang", forward_communicates=True) == stops
    assert at_end(of(3), of(5)) == stops
    assert at_end(of(5), of(0), on_mismatch="raise_on_hang").ends_at == 0, "Lightning raises there"
    together = at_end(of(3), of(5), on_mismatch="raise_on_hang", on_uneven="stop_together")
    assert together == LoaderTerms(length=3)
    assert at_end(of(3), STREAM, on_mismatch="raise_on_hang").votes
    assert at_end(STREAM, STREAM, on_mismatch="raise_on_hang") == LoaderTerms(votes=True, may_part=True)
    assert at_end(STREAM, STREAM) == LoaderTerms(votes=True)
    assert at_end(STREAM, STREAM, on_mismatch="raise_on_hang", forward_communicates=True) == LoaderTerms(votes=True)


@pytest.mark.parametrize(
    ("on_uneven", "expected"),
    [
        ("stop_together", LoaderTerms(length=3)),
        ("repeat", LoaderTerms(length=5)),
        ("raise", LoaderTerms(length=4, ends_at=3, lengths=(5, 3, 4))),
    ],
)
def test_unequal_known_lengths_become_one(on_uneven: str, expected: LoaderTerms) -> None:
    assert terms(of(5), of(3), of(4), on_uneven=on_uneven) == expected


def test_every_loader_has_its_own_terms() -> None:
    ranks = [DataFacts(stage="val_dataloader", loaders=(STREAM, LISTED)) for _ in range(3)]
    assert terms_of(ranks) == (LoaderTerms(votes=True), LoaderTerms())


def test_different_numbers_of_loaders_have_none() -> None:
    assert terms_of([DataFacts(stage="val_dataloader", loaders=(LISTED,)), DataFacts(stage="val_dataloader")]) == ()
    assert terms_of([]) == ()


def test_loaders_that_end_together_all_the_same_are_left_alone() -> None:
    """The shorter ones go round while the longest is read; where a stream is among them, nobody knows how often."""

    def rank(short: int, *more: LoaderFacts) -> DataFacts:
        return DataFacts(stage="train_dataloader", mode="max_size_cycle", loaders=(of(6), of(short), *more))

    assert terms_of([rank(2), rank(3)]) == (LoaderTerms(), LoaderTerms())
    assert terms_of([rank(2, STREAM), rank(3, STREAM)])[1] == LoaderTerms(length=3, ends_at=2, lengths=(2, 3))


def test_lengths_that_a_limit_makes_equal_are_left_alone() -> None:
    assert terms(LoaderFacts(length=5, batches=3), LoaderFacts(length=4, batches=3)) == LoaderTerms()
