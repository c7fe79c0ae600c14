"""How large a batch is, whatever it may be made of."""

from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from itertools import islice
from typing import Any

# Enough for any batch that is collated; of one that is not, what is seen stands for the rest.
_MOST_VALUES = 256
_MOST_OF_ONE = 64
_DEEPEST = 6


def bytes_of(batch: Any) -> int:
    """Bytes of all tensors, arrays and strings in a batch: nested containers, dataclasses and objects are looked into.

    Of a long list the first 64 are, and stand for the others. At most some 256 values are, which takes about 0.2 ms.

    Args:
        batch: What a loader has given.
    """
    return int(_bytes_of(batch, _DEEPEST, _Count(_all_bytes)))


def tensors_of(batch: Any) -> int:
    """Number of tensors in a batch, found as :func:`bytes_of` finds them."""
    return int(_bytes_of(batch, _DEEPEST, _Count(_tensors)))


class _Count:
    def __init__(self, weigh: Callable[[Any, int], float]) -> None:
        self.left = _MOST_VALUES
        self.weigh = weigh


def _all_bytes(value: Any, size: int) -> float:
    return float(size)


def _tensors(value: Any, size: int) -> float:
    return 1.0 if hasattr(value, "share_memory_") else 0.0


def _bytes_of(value: Any, depth: int, count: _Count) -> float:
    count.left -= 1
    # A class that makes up its attributes may fail in any way.
    with suppress(Exception):
        size = getattr(value, "nbytes", None)
        if isinstance(size, int):
            return count.weigh(value, size)
        if isinstance(value, (str, bytes, bytearray)):
            return count.weigh(value, len(value))
        parts = _parts_of(value)
        if depth and parts:
            return _sum_of(parts, depth - 1, count)
    return 0.0


def _sum_of(parts: Any, depth: int, count: _Count) -> float:
    seen = total = 0.0
    for part in islice(_values(parts), _MOST_OF_ONE):
        if count.left <= 0:
            break
        total += _bytes_of(part, depth, count)
        seen += 1
    return total * len(parts) / seen if seen else 0.0


def _parts_of(value: Any) -> Any:
    if isinstance(value, (Mapping, list, tuple, Set)):
        return value
    slots = {name: getattr(value, name, None) for name in getattr(type(value), "__dataclass_fields__", ())}
    return slots or getattr(value, "__dict__", None)


def _values(parts: Any) -> Iterable[Any]:
    return parts.values() if isinstance(parts, Mapping) else parts
