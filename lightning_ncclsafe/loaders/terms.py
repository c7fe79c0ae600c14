"""What follows for each loader from what all ranks have presented: does it need a vote, does its length change."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ncclsafe.data_facts import DataFacts, LoaderFacts
from lightning_ncclsafe.rules.presented import epoch_batches
from lightning_ncclsafe.settings import OnUneven


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTerms:
    """What ranks have agreed on about one loader.

    Attributes:
        votes: Whether ranks vote before each batch on whether all of them have one, as its length is not known, or
            only claimed by an ``IterableDataset``.
        hides_length: Whether the loader claims no length from now on, as only some ranks know one.
        length: The number of batches it has on every rank from now on; None for as many as it says itself.
        ends_at: The batch before which it ends in an error on all ranks, as the shortest has no more; None for none.
        lengths: Its length on each rank, by rank, where it ends in an error.
    """

    votes: bool = False
    hides_length: bool = False
    length: int | None = None
    ends_at: int | None = None
    lengths: tuple[int, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether the loader stays as it is, and costs nothing."""
        return self == LoaderTerms()


def terms_of(ranks: Iterable[DataFacts]) -> tuple[LoaderTerms, ...]:
    """The terms for each loader of a stage.

    Args:
        ranks: What each rank presents.

    Returns:
        One for each loader; none where ranks have different numbers of loaders.
    """
    presented = list(ranks)
    if not presented or len({len(data.loaders) for data in presented}) != 1:
        return ()
    if len({epoch_batches(data) for data in presented}) == 1 and not any(map(_is_unknown, presented[0].loaders)):
        return tuple(LoaderTerms() for _ in presented[0].loaders)
    on_uneven = presented[0].on_uneven
    return tuple(_terms(loaders, on_uneven) for loaders in zip(*(data.loaders for data in presented), strict=True))


def _is_unknown(loader: LoaderFacts) -> bool:
    return loader.iterable or loader.length is None


def _terms(loaders: tuple[LoaderFacts, ...], on_uneven: OnUneven | str) -> LoaderTerms:
    if any(map(_is_unknown, loaders)):
        return LoaderTerms(votes=True, hides_length=len({loader.length for loader in loaders}) > 1)
    lengths = tuple(loader.length or 0 for loader in loaders)
    if len(set(lengths)) == 1:
        return LoaderTerms()
    if on_uneven == "repeat":
        return LoaderTerms(length=max(lengths))
    if on_uneven == "stop_together":
        return LoaderTerms(length=min(lengths))
    # One more than the shortest rank has: in asking for that one all ranks meet the end.
    return LoaderTerms(length=min(lengths) + 1, ends_at=min(lengths), lengths=lengths)
