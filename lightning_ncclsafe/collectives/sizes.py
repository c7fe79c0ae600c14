"""How much data a rank gives to a collective, by an entry of the Flight Recorder."""

from collections.abc import Sequence
from math import prod
from typing import Any

# By the names of torch's ScalarType; other types count as one byte.
_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "UInt16": 2,
    "Int": 4,
    "UInt32": 4,
    "Float": 4,
    "ComplexHalf": 4,
    "Long": 8,
    "UInt64": 8,
    "Double": 8,
    "ComplexFloat": 8,
    "ComplexDouble": 16,
}


def size_bytes(entry: dict[str, Any]) -> int:
    """Bytes that this rank puts into a collective or, if it only receives, gets out of it."""
    return _bytes(entry.get("input_sizes"), entry.get("input_dtypes")) or _bytes(
        entry.get("output_sizes"), entry.get("output_dtypes")
    )


def _bytes(shapes: Sequence[Sequence[int]] | None, dtypes: Sequence[str] | None) -> int:
    if not shapes or not dtypes:
        return 0
    # The recorder keeps one type if all tensors have the same.
    of_each = dtypes if len(dtypes) == len(shapes) else [dtypes[0]] * len(shapes)
    return sum(prod(shape) * _BYTES.get(dtype, 1) for shape, dtype in zip(shapes, of_each, strict=True))
