"""A dataset and those below it, through Subset, ConcatDataset and other wrappers."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from torch.utils.data import IterableDataset

from lightning_ncclsafe.probes.data.reading import class_name, stored

_MOST_DATASETS = 256
_MOST_LEVELS = 16
_MOST_NAMES = 32
# Its own module names, not "datasets.": many projects keep a package of that name.
_HUGGING_FACE = {"datasets.arrow_dataset": "Dataset", "datasets.iterable_dataset": "IterableDataset"}


def chain(dataset: Any) -> list[Any]:
    """The dataset itself and those below it, level by level from the outside in; at most 256 and 16 levels deep."""
    found: list[Any] = []
    level: list[tuple[Any, ...]] = [(dataset,)]
    for _ in range(_MOST_LEVELS):
        found += [path[-1] for path in level]
        below = [(*path, inner) for path in level for inner in _below(path[-1]) if _is_new(inner, path)]
        level = below[: _MOST_DATASETS - len(found)]
    return found


def chain_names(datasets: list[Any]) -> tuple[str, ...]:
    """Class names of datasets, equal neighbours as one with their number."""
    groups = [(name, len(list(same))) for name, same in groupby(map(class_name, datasets))]
    names = [f"{name} \N{MULTIPLICATION SIGN}{count}" if count > 1 else name for name, count in groups]
    is_cut = len(names) > _MOST_NAMES or len(datasets) >= _MOST_DATASETS
    return (*names[:_MOST_NAMES], *(["…"] if is_cut else []))


def is_iterable(dataset: Any) -> bool:
    """Whether a dataset can only be iterated."""
    return isinstance(dataset, IterableDataset) or hugging_face(dataset) == "IterableDataset"


def hugging_face(dataset: Any) -> str:
    """``"Dataset"`` or ``"IterableDataset"`` for those of the library ``datasets`` and classes derived from them."""
    names = (name for base in type(dataset).__mro__ if (name := _HUGGING_FACE.get(base.__module__)) == base.__name__)
    return next(names, "")


def _below(dataset: Any) -> Iterator[Any]:
    inner = stored(dataset, "dataset")
    if inner is not None:
        yield inner
    many = stored(dataset, "datasets")
    if type(many) in (list, tuple):
        yield from many[:_MOST_DATASETS]
    if type(many) is dict:
        yield from list(many.values())[:_MOST_DATASETS]


def _is_new(dataset: Any, path: tuple[Any, ...]) -> bool:
    return all(dataset is not outer for outer in path)
