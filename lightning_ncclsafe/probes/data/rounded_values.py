"""What shows whether two ranks have the same floating-point numbers but for rounding, where their hashes differ."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_ncclsafe.facts import RoundedArray
from lightning_ncclsafe.probes.data.plain_values import HashLimits, head_of, is_array, picked_rows, positions

_BITS = {"float32": 32, "float64": 64}
_SAMPLES = 16
_CHUNK = 65_536


def rounded_array(rows: Any, limits: HashLimits) -> RoundedArray | None:
    """An array of floating-point numbers, as far as it is hashed; None for anything else.

    Nor for numbers that cannot have been rounded, or of which a sum says nothing: whole ones, and those that are not
    finite, are compared exactly. So are those of half precision, of which rounding may change much.
    """
    bits = _BITS.get(str(rows.dtype).rpartition(".")[2]) if is_array(rows) and len(rows.shape) else None
    numbers = _flat(head_of(picked_rows(rows, limits), limits.element_bytes)) if bits is not None else ()
    if bits is None or not len(numbers):
        return None
    with np.errstate(all="ignore"):
        sums = _sums(numbers)
    if sums is None:
        return None
    samples = tuple(float(numbers[place]) for place in positions(len(numbers), _SAMPLES))
    return RoundedArray(bits=bits, samples=samples, sums=sums)


def _flat(array: Any) -> Any:
    return array.detach().resolve_neg().reshape(-1).numpy() if isinstance(array, torch.Tensor) else array.reshape(-1)


def _sums(numbers: Sequence[float]) -> tuple[float, ...] | None:
    """The sum of absolute values, and the weighted sums; None if all numbers are whole, or one is not finite."""
    sums, are_whole = np.zeros(1 + len(_weights())), True
    for index, chunk in enumerate(_chunks(numbers)):
        are_whole = are_whole and bool((chunk == np.rint(chunk)).all())
        weighted = _weights()[:, : len(chunk)] @ chunk
        # Chunks may change places, too.
        sums += (np.sum(np.abs(chunk)), *(weighted * (0.5 + index * math.sqrt(11) % 1)))
    return None if are_whole or not np.isfinite(sums).all() else tuple(sums.tolist())


def _chunks(numbers: Any) -> Iterator[Any]:
    yield from (np.asarray(numbers[begin : begin + _CHUNK], np.float64) for begin in range(0, len(numbers), _CHUNK))


@lru_cache(maxsize=1)
def _weights() -> Any:
    """Four weights for each place in a chunk: the same numbers in another order have other weighted sums."""
    places = np.arange(_CHUNK, dtype=np.float64)
    return np.stack([places * math.sqrt(prime) % 1 + 0.5 for prime in (2, 3, 5, 7)])
