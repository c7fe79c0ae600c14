"""Which elements of something long are looked at, the same on every rank, and hashes of long lists of numbers."""

import hashlib
import random
import sys
from array import array
from typing import Any

WHOLE = 65_536
"""Up to so many indices, names or batches, all are hashed."""

SAMPLED = 1_024
"""Of more, so many."""


def positions(length: int, most: int) -> list[int]:
    """Positions that depend on the two numbers alone: all, or else both ends, an even spread, and random ones.

    The ends come first and the rest in no order, so that whoever stops early has seen a fair part.

    Args:
        length: Number of elements there are.
        most: Number of positions wanted; at least 2.
    """
    if length <= most:
        return list(range(length))
    # Of the generator's functions, Python promises for random() alone that a newer version gives the same.
    draw = random.Random(length).random
    spread = [length * place // (most // 2) for place in range(1, most // 2)]
    scattered = [min(int(draw() * length), length - 1) for _ in range(most - len(spread) - 2)]
    inner = [*spread, *scattered]
    # No list of pairs: so many new tuples would have Python search all of the user's data for garbage.
    order = [draw() for _ in inner]
    mixed = [inner[place] for place in sorted(range(len(inner)), key=order.__getitem__)]
    return list(dict.fromkeys((0, length - 1, *mixed)))


def pick(sequence: Any, content: str, width: int = 1) -> list[Any]:
    """Elements to hash: all of a list that is short or with ``content="full"``, otherwise some.

    Args:
        sequence: The list.
        content: See :func:`~lightning_ncclsafe.probes.data.fingerprints.fingerprints`.
        width: Numbers in an element.
    """
    length = len(sequence)
    if length * width <= WHOLE or content == "full":
        return sequence.tolist() if hasattr(sequence, "tolist") else list(sequence)
    return [sequence[position] for position in positions(length, SAMPLED)]


def digest(*parts: bytes) -> str:
    """Short hash of parts, each with its length."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()


def numbers_as_bytes(sequence: Any, content: str) -> bytes:
    """A list of whole numbers, or some of its numbers, as bytes: the same for a list, a range, an array or a tensor.

    Raises:
        TypeError: If one is not a whole number.
        OverflowError: If one is too large for 64 bits.
    """
    numbers = array("q", pick(sequence, content))
    if sys.byteorder == "big":  # pragma: no cover - needs such a machine
        numbers.byteswap()
    return len(sequence).to_bytes(8, "little") + numbers.tobytes()


def batches_as_bytes(batches: Any, content: str) -> bytes:
    """A list of numbers or of lists of numbers; see :func:`numbers_as_bytes`."""
    if not len(batches) or type(batches[0]) not in (list, tuple):
        return numbers_as_bytes(batches, content)
    picked = pick(batches, content, width=len(batches[0]))
    return len(batches).to_bytes(8, "little") + b"".join(numbers_as_bytes(batch, content) for batch in picked)
