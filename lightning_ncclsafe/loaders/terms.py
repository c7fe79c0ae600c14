"""What follows for each loader from what all ranks have presented: does it need a vote, does its length change."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ncclsafe.data_facts import DataFacts, LoaderFacts
from lightning_ncclsafe.rules.presented import epoch_batches, evaluates_alone, goes_alone
from lightning_ncclsafe.settings import OnUneven


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTerms:
    """What ranks have agreed on about one loader.

    Attributes:
        votes: Whether ranks vote before each batch on whether all of them have one: its length is not known, or an
            ``IterableDataset`` claims different ones. An equal claim is believed, as Lightning believes it.
        looks_ahead: Whether they vote one batch ahead, as on every rank worker processes alone make the batches. What a
            rank's own process takes part in may depend on what has been trained when it is fetched.
        may_part: Whether ranks that have called no collective meanwhile may end at different batches, as they evaluate.
        hides_length: Whether the loader claims no length from now on, as ranks would not claim the same.
        length: The number of batches it has on every rank from now on; None for as many as it says itself.
        ends_at: The batch before which it ends in an error on all ranks, as the shortest has no more; None for none.
        lengths: Its length on each rank, by rank, where it ends in an error.
    """

    votes: bool = False
    looks_ahead: bool = False
    may_part: bool = False
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
    # Ranks predict, and mostly evaluate, each for itself, and may end when they like.
    if all(map(goes_alone, presented)) or _ends_together(presented):
        return tuple(LoaderTerms() for _ in presented[0].loaders)
    on_uneven = presented[0].on_uneven
    may_part = all(map(evaluates_alone, presented))
    return tuple(
        _terms(loaders, on_uneven, may_part) for loaders in zip(*(data.loaders for data in presented), strict=True)
    )


def _ends_together(ranks: list[DataFacts]) -> bool:
    """Whether all lengths are known and make epochs that are equally long on all ranks."""
    known = all(loader.length is not None for data in ranks for loader in data.loaders)
    return known and len({epoch_batches(data) for data in ranks}) == 1


def _terms(loaders: tuple[LoaderFacts, ...], on_uneven: OnUneven | str, may_part: bool) -> LoaderTerms:
    lengths = tuple(loader.length for loader in loaders)
    known = tuple(length for length in lengths if length is not None)
    if len(known) == len(lengths) and len(set(known)) == 1:
        return LoaderTerms()
    agreed = {"stop_together": min, "repeat": max}.get(on_uneven)
    length = agreed(known) if agreed is not None and len(known) == len(lengths) else None
    if any(loader.iterable for loader in loaders) or len(known) < len(lengths):
        return LoaderTerms(
            votes=True,
            looks_ahead=all(loader.made_by_workers for loader in loaders),
            may_part=may_part,
            length=length,
            hides_length=length is None and bool(known),
        )
    if length is not None:
        return LoaderTerms(length=length)
    # One more than the shortest rank has: in asking for that one all ranks meet the end.
    return LoaderTerms(length=min(known) + 1, ends_at=min(known), lengths=known)
