"""Reading the user's loaders and datasets, where every access may raise, and the datasets inside wrappers."""

import inspect
import operator
import traceback
import types
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, TypeVar

from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ncclsafe.probes.process.stacks import is_user_code

T = TypeVar("T")

_MOST_CHARACTERS = 200
# Larger numbers do not fit into the JSON that ranks exchange.
_LARGEST = (1 << 63) - 1

_MOST_DATASETS = 256
_MOST_LEVELS = 16
_MOST_NAMES = 32
# Those whose samplers are known.
_LIBRARIES = ("torch", "lightning", "pytorch_lightning")
# Its own module names, not "datasets.": many projects keep a package of that name.
_HUGGING_FACE = {"datasets.arrow_dataset": "Dataset", "datasets.iterable_dataset": "IterableDataset"}


class Reader:
    """Reads attributes of objects, and collects a sentence about each failure.

    Attributes:
        problems: The sentences, in order.
        no_length_at: ``"file:line in __len__"`` of the user's line that raises because there is no length; may be
            empty.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.no_length_at = ""

    def attempt(self, words: str, read: Callable[[], T]) -> T | None:
        """The result of ``read``; None, and a sentence, if it raises.

        Args:
            words: The subject of the sentence: ``"len(dataset)"``.
        """
        try:
            return read()
        except Exception as error:
            self.problems.append(f"{words} raised {_said(error)}")
        return None

    def attribute(self, owner: Any, name: str, words: str) -> Any:
        """An attribute, which may be a property; None if it is missing or raises."""
        return self.attempt(f"{words}.{name}", lambda: getattr(owner, name, None))

    def whole_number(self, owner: Any, name: str, words: str) -> int | None:
        """An attribute that is a whole number; None if it is anything else."""
        return whole_number(self.attribute(owner, name, words))

    def flag(self, owner: Any, name: str, words: str) -> bool | None:
        """An attribute that is a bool; None if it is anything else."""
        value = self.attribute(owner, name, words)
        return value if isinstance(value, bool) else None

    def length(self, owner: Any, words: str) -> int | None:
        """``len(owner)``; None if it has none, and None with a sentence if ``len`` fails."""
        try:
            return len(owner)
        except Exception as error:
            # PyTorch raises TypeError if there is no length; a length of 2.5 raises it, too.
            is_absent = isinstance(error, (TypeError, NotImplementedError))
            if not is_absent or "cannot be interpreted as an integer" in _said(error):
                self.problems.append(f"len({words}) raised {_said(error)}")
            else:
                self.no_length_at = _raised_at(error)
        return None


def whole_number(value: Any) -> int | None:
    """The value as an ``int`` if it is a whole number of any kind, numpy's included; None otherwise."""
    try:
        number = operator.index(value)
    except Exception:
        return None
    return number if not isinstance(value, bool) and abs(number) <= _LARGEST else None


def plain_attribute(owner: Any, name: str) -> Any:
    """A plain attribute of the object or its class; None if there is none.

    Runs no property and no ``__getattr__``: those of a dataset may list a directory or open a file.
    """
    try:
        found = inspect.getattr_static(owner, name, None)
        if isinstance(found, types.MemberDescriptorType):
            return found.__get__(owner)
    except Exception:
        return None
    return None if hasattr(type(found), "__get__") else found


def class_name(value: Any) -> str:
    """The name of an object's class."""
    return str(type(value).__name__)


def _raised_at(error: Exception) -> str:
    """The user's innermost line that an exception comes through; empty if there is none."""
    lines = ((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__))
    places = [f"{code.co_filename}:{line} in {code.co_name}" for code, line in lines if is_user_code(code.co_filename)]
    return places[-1] if places else ""


def _said(error: Exception) -> str:
    """Type and message of an exception on one line, whatever its ``__str__`` does."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = ""
    short = message if len(message) <= _MOST_CHARACTERS else message[:_MOST_CHARACTERS] + "…"
    return f"{type(error).__name__}: {short}" if short else f"{type(error).__name__}."


def nested_datasets(dataset: Any) -> list[Any]:
    """The dataset and the datasets in it, level by level from the outside in; at most 256, and 16 levels deep."""
    found: list[Any] = []
    level: list[tuple[Any, ...]] = [(dataset,)]
    for _ in range(_MOST_LEVELS):
        found += [path[-1] for path in level]
        below = [
            (*path, inner) for path in level for inner in _below(path[-1]) if all(inner is not outer for outer in path)
        ]
        level = below[: _MOST_DATASETS - len(found)]
    return found


def nested_names(datasets: list[Any]) -> tuple[str, ...]:
    """Class names of datasets; equal neighbours as one, with their number."""
    groups = [(name, len(list(same))) for name, same in groupby(map(class_name, datasets))]
    names = [f"{name} \N{MULTIPLICATION SIGN}{count}" if count > 1 else name for name, count in groups]
    is_cut = len(names) > _MOST_NAMES or len(datasets) >= _MOST_DATASETS
    return (*names[:_MOST_NAMES], *(["…"] if is_cut else []))


def is_iterable(dataset: Any) -> bool:
    """Whether a dataset can only be iterated."""
    return isinstance(dataset, IterableDataset) or hugging_face(dataset) == "IterableDataset"


def is_indices(sampler: Any) -> bool:
    """Whether a sampler consists of the indices that it was given."""
    return isinstance(sampler, (list, tuple, range, SubsetRandomSampler, WeightedRandomSampler))


def goes_through_all(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler gives as many indices as the dataset has samples, or this rank's share of them."""
    is_known = type(sampler).__module__.partition(".")[0] in _LIBRARIES
    is_whole = isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler))
    of_it = any(plain_attribute(sampler, name) is dataset for name in ("data_source", "dataset"))
    return is_known and is_whole and of_it and plain_attribute(sampler, "_num_samples") is None


def hugging_face(dataset: Any) -> str:
    """``"Dataset"`` or ``"IterableDataset"`` for those of the library ``datasets`` and classes derived from them."""
    names = (name for base in type(dataset).__mro__ if (name := _HUGGING_FACE.get(base.__module__)) == base.__name__)
    return next(names, "")


def _below(dataset: Any) -> Iterator[Any]:
    inner = plain_attribute(dataset, "dataset")
    if inner is not None:
        yield inner
    many = plain_attribute(dataset, "datasets")
    if type(many) in (list, tuple):
        yield from many[:_MOST_DATASETS]
    if type(many) is dict:
        yield from list(many.values())[:_MOST_DATASETS]
