"""What shows whether two ranks have the same floating-point numbers but for rounding, where their hashes differ."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_ncclsafe.facts import RoundedArray
from lightning_ncclsafe.probes.data.plain_values import HashLimits, head_of, is_array, picked_rows, positions

_TYPES = ("float32", "float64")
_SAMPLES = 16
# Arrays with more numbers in a row, such as pictures, have no columns of their own scales.
_MOST_COLUMNS = 64
_CHUNK = 65_536
# Rounding changes a number by some units in the last place.
_LAST_PLACES = 16
# Functions of lower accuracy err by less, in units of how far numbers are apart: PyTorch's first cosine on several
# threads may err by 1 in 5,000, either way, so that a sum errs by a small part of that for each of its numbers.
_APART: dict[type[Any], float] = {np.float32: 1e-3, np.float64: 1e-6}
_OF_SUMS = 3e-3


def rounded_array(rows: Any, limits: HashLimits) -> RoundedArray | None:
    """An array of floating-point numbers, as far as it is hashed; None for anything else.

    Each column is measured by its own mean and spread, so that no column hides another one. Whole numbers, which no
    rounding makes, numbers of half precision, of which it may change much, and what is not finite are compared exactly.
    """
    if not is_array(rows) or not len(rows.shape) or str(rows.dtype).rpartition(".")[2] not in _TYPES:
        return None
    table = _table(head_of(picked_rows(rows, limits), limits.element_bytes))
    with np.errstate(all="ignore"):
        return _measured(table) if table.size else None


def _table(array: Any) -> Any:
    """The numbers in two dimensions, without a copy where that is possible."""
    numbers = array.detach().resolve_neg().numpy() if isinstance(array, torch.Tensor) else array
    rows = numbers.reshape(len(numbers), -1) if numbers.ndim and numbers.size else numbers.reshape(-1, 1)
    return rows if rows.shape[1] <= _MOST_COLUMNS else rows.reshape(-1, 1)


def _measured(table: Any) -> RoundedArray | None:
    center, spread, kind = _columns(table)
    if kind is None:
        return None
    sums = np.zeros(len(_weights()))
    for index, chunk in enumerate(_chunks(table)):
        # Chunks may change places, too.
        normal = ((chunk - center) / spread).reshape(-1)
        sums += _weights()[:, : chunk.size] @ normal * (0.5 + index * math.sqrt(11) % 1)
    rows = positions(len(table), _SAMPLES)
    columns = [number % table.shape[1] for number in range(len(rows))]
    samples = (np.asarray(table[rows, columns], np.float64) - center[columns]) / spread[columns]
    apart, places = _APART[kind], _LAST_PLACES * float(np.finfo(kind).eps) * np.abs(center) / spread
    of_columns = table.shape[1] * (apart / 100 + places.max())
    numbers = (*samples, *sums, np.log(spread).sum(), (center / spread).sum())
    bounds = (
        *(apart * (1 + np.abs(samples)) + places[columns]),
        *(table.size * (_OF_SUMS * apart + places.max()) for _ in sums),
        *(of_columns, of_columns),
    )
    return RoundedArray(*(tuple(map(float, each)) for each in (numbers, bounds))) if np.isfinite(bounds).all() else None


def _columns(table: Any) -> tuple[Any, Any, type[Any] | None]:
    """The mean and spread of each column, and the precision; no precision if all are whole, or one is not finite."""
    are_whole, is_single, begin = True, True, np.asarray(table[0], np.float64)
    total, squares = np.zeros(len(begin)), np.zeros(len(begin))
    for chunk in _chunks(table):
        are_whole = are_whole and bool((chunk == np.rint(chunk)).all())
        # What was computed in single precision may be kept in double precision.
        is_single = is_single and bool((chunk == chunk.astype(np.float32)).all())
        total += (chunk - begin).sum(0)
        squares += ((chunk - begin) ** 2).sum(0)
    mean = total / len(table)
    center, spread = mean + begin, np.sqrt(np.maximum(squares / len(table) - mean**2, 0.0))
    # The spread of a constant column is unknown.
    spread = np.where(spread > 0, spread, np.where(center == 0, 1.0, np.abs(center)))
    is_known = not are_whole and bool(np.isfinite(center).all() and np.isfinite(spread).all())
    return center, spread, (np.float32 if is_single else np.float64) if is_known else None


def _chunks(table: Any) -> Iterator[Any]:
    rows = _CHUNK // table.shape[1]
    yield from (np.asarray(table[begin : begin + rows], np.float64) for begin in range(0, len(table), rows))


@lru_cache(maxsize=1)
def _weights() -> Any:
    """Four weights for each place in a chunk: the same numbers in another order have other weighted sums."""
    places = np.arange(_CHUNK, dtype=np.float64)
    return np.stack([places * math.sqrt(prime) % 1 + 0.5 for prime in (2, 3, 5, 7)])
