"""A few samples as the dataset gives them, read twice, so that random augmentation is known when it is met."""

import time
from collections.abc import Iterator
from typing import Any

from lightning_ncclsafe.probes.data.arrays import is_shaped, kind_of
from lightning_ncclsafe.probes.data.plain_values import SAMPLE, UnknownValueError, ValueDigest
from lightning_ncclsafe.probes.data.random_state import random_states_kept, seed_all
from lightning_ncclsafe.probes.data.sampling import digest, positions

_ITEMS = 8
_DEADLINE_S = 1.0
_MOST_LEVELS = 8
_MOST_ELEMENTS = 64


class ItemsTakeTooLongError(Exception):
    """The samples could not be read within their time."""


def item_fingerprints(dataset: Any, length: int) -> dict[str, str]:
    """Hashes of up to 8 samples: ``"shapes"``, and ``"items"`` if reading them again gave the same bytes.

    The global random number generators are as before when it returns. What else ``dataset[i]`` changes (a file that
    it opens, a generator of its own) stays changed: this is only for users who asked for it.

    Args:
        dataset: Anything that is indexed.
        length: Its length.

    Raises:
        ItemsTakeTooLongError: If they cannot all be read within about a second. Of some there is no hash: another
            rank may get further.
        Exception: Whatever ``dataset[i]`` raises.
    """
    with random_states_kept():
        reads = list(_reads(dataset, length))
    (shapes, values), *others = [tuple(zip(*read, strict=True)) for read in zip(*reads, strict=True)]
    found = {}
    if all(other[0] == shapes for other in others):
        found["shapes"] = digest(*(shape.encode() for shape in shapes))
    if all(other[1] == values for other in others) and "" not in values:
        found["items"] = digest(*(value.encode() for value in values))
    return found


def _reads(dataset: Any, length: int) -> Iterator[list[tuple[str, str]]]:
    """Shape and hash of each sample, in each of two reads."""
    deadline = time.monotonic() + _DEADLINE_S
    for number, position in enumerate(positions(length, _ITEMS)):
        read = []
        for seed in (2 * number, 2 * number + 1):
            if time.monotonic() > deadline:
                raise ItemsTakeTooLongError(f"{number} samples were read in {_DEADLINE_S:g} s")
            # Two seeds, so that what is random differs; fixed ones, so that where it happens not to, it is the same
            # on every rank.
            seed_all(seed)
            item = dataset[position]
            read.append((shape_of(item), _hash(item)))
        yield read


def shape_of(value: Any, level: int = 0) -> str:
    """Types, keys, element types and shapes in a sample, as text."""
    name = type(value).__qualname__
    if is_shaped(value):
        return kind_of(value)
    if level == _MOST_LEVELS:
        return name
    if type(value) is dict:
        pairs = sorted((f"{key!s:.80}", shape_of(item, level + 1)) for key, item in _first(value.items()))
        return f"{name} {len(value)} {pairs}"
    if type(value) in (list, tuple):
        return f"{name} {len(value)} {[shape_of(item, level + 1) for item in _first(value)]}"
    return name


def _first(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_MOST_ELEMENTS), strict=False)]


def _hash(item: Any) -> str:
    hashed = ValueDigest(SAMPLE)
    try:
        hashed.value(item)
    except UnknownValueError:
        return ""
    return hashed.hexdigest()
