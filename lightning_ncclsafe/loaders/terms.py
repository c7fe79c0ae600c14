"""What follows for each loader from what all ranks have presented: does it need a vote, does its length change."""

from collections.abc import Iterable

from lightning_ncclsafe.facts import DataFacts, LoaderFacts, LoaderTerms
from lightning_ncclsafe.rules.kit.data import epoch_batches, evaluates_alone, goes_alone
from lightning_ncclsafe.settings import OnUneven


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
