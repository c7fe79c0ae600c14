"""Hashes of numbers, text, arrays, and lists and dictionaries of these: equal on every host for equal values.

From long lists, a fixed selection of elements is hashed, the same on every rank.
"""

import datetime
import decimal
import hashlib
import math
import random
import sys
from array import array
from pathlib import PurePath
from typing import Any, NamedTuple

import torch

WHOLE = 65_536
"""Up to this number, all indices, names or batches are hashed."""

SAMPLED = 1_024
"""How many are hashed of longer lists."""


def positions(length: int, most: int) -> list[int]:
    """Positions that depend only on the two numbers: all, or else both ends, an even spread, and random ones.

    The ends come first, and the rest in random order, so that the beginning of the list is a fair sample.

    Args:
        most: Number of positions wanted; at least 2.
    """
    if length <= most:
        return list(range(length))
    # Python guarantees the same numbers in newer versions only for random().
    draw = random.Random(length).random
    spread = [length * place // (most // 2) for place in range(1, most // 2)]
    scattered = [min(int(draw() * length), length - 1) for _ in range(most - len(spread) - 2)]
    inner = [*spread, *scattered]
    # No list of pairs: so many new tuples would start a garbage collection over all of the user's data.
    order = [draw() for _ in inner]
    mixed = [inner[place] for place in sorted(range(len(inner)), key=order.__getitem__)]
    return list(dict.fromkeys((0, length - 1, *mixed)))


def pick(sequence: Any, content: str, width: int = 1) -> list[Any]:
    """Elements to hash: all of a list that is short or with ``content="full"``, otherwise some.

    Args:
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


_MOST_LEVELS = 8
_LONGEST_PATH = 4_096
# What one value costs, in bytes that are hashed in the same time: so the limit also ends long lists of numbers.
_BYTES_PER_VALUE = 128
# Types with a repr() that gives the exact value, on every machine.
_SCALARS = (type(None), bool, int, float, complex, datetime.date, datetime.timedelta, decimal.Decimal)

# Not objects: their bytes are addresses. Not records: their padding may be anything.
_ARRAY_KINDS = "biufcSUMm"


class UnknownValueError(Exception):
    """A value without a hash that is equal in every process."""


class HashLimits(NamedTuple):
    """How much is hashed.

    Attributes:
        rows: Elements of a list, or rows of an array that is too large to be hashed whole.
        element_bytes: Bytes of one array or text.
        total_bytes: Bytes after which no further row is hashed.
    """

    rows: int
    element_bytes: int
    total_bytes: int

    def shared(self, among: int) -> "HashLimits":
        """The limits for one of several datasets."""
        return HashLimits(max(2, self.rows // among), self.element_bytes, self.total_bytes // among)


SAMPLE = HashLimits(rows=1_024, element_bytes=1 << 20, total_bytes=2 << 20)
FULL = HashLimits(rows=65_536, element_bytes=1 << 30, total_bytes=1 << 28)


class ValueDigest:
    """Hashes values one after another.

    Attributes:
        names_files: Whether the path of a file was among them.

    Args:
        whole_paths: Whether the whole path of a file counts, and not only its base name.
    """

    def __init__(self, limits: HashLimits, *, whole_paths: bool = False) -> None:
        self._whole_paths = whole_paths
        self.names_files = False
        self._hash = hashlib.blake2b(digest_size=8)
        self._limits = limits
        self._taken = 0
        self._enough = limits.total_bytes

    def hexdigest(self) -> str:
        """The hash of all values so far."""
        return self._hash.hexdigest()

    def rows(self, rows: Any) -> None:
        """Hashes a list, or an array that may be large: rows at fixed positions, up to the limits.

        Raises:
            UnknownValueError: If a row has something that cannot be hashed.
        """
        self._enough = self._taken + self._limits.total_bytes
        if is_array(rows):
            picked = picked_rows(rows, self._limits)
            if picked is not rows:
                self._write("rows", kind_of(rows).encode())
            return self._array(picked)
        self._sequence(rows, 0)

    def value(self, value: Any, level: int = 0) -> None:
        """Hashes one value.

        Raises:
            UnknownValueError: If the value, or something in it, cannot be hashed.
        """
        kind = type(value)
        if level > _MOST_LEVELS:
            raise UnknownValueError("nested too deeply")
        if kind in _SCALARS or (kind is datetime.datetime and value.tzinfo is None):
            self._write(kind.__name__, repr(value).encode())
        elif kind is str or isinstance(value, PurePath):
            text = str(value)
            # An absolute path is not "/", "/s" or a text of several lines.
            is_path = text.startswith("/") and text.count("/") > 1 and len(text) < _LONGEST_PATH and "\n" not in text
            (self._path if is_path else self._string)(text)
        elif kind in (bytes, bytearray):
            self._write("bytes", len(value).to_bytes(8, "little"), value[: self._limits.element_bytes])
        elif is_array(value):
            self._array(value)
        else:
            self._container(value, level)

    def _container(self, value: Any, level: int) -> None:
        if type(value) is dict:
            self._write("dict", len(value).to_bytes(8, "little"))
            for key, item in sorted(value.items(), key=lambda pair: (type(pair[0]).__name__, str(pair[0]))):
                self.value(key, level + 1)
                if key == "path" and type(item) is str:
                    self._path(item)
                else:
                    self.value(item, level + 1)
        elif type(value) in (list, tuple, range) or _is_named_tuple(value):
            self._sequence(value, level + 1)
        else:
            raise UnknownValueError(type(value).__name__)

    def _sequence(self, rows: Any, level: int) -> None:
        self._write("list", len(rows).to_bytes(8, "little"))
        for number, position in enumerate(positions(len(rows), self._limits.rows)):
            if number >= 2 and self._taken > self._enough:
                break
            self.value(rows[position], level)

    def _path(self, text: str) -> None:
        # If each host or rank has its own copy of the data, paths differ although the data is equal.
        self.names_files = self.names_files or "/" in text
        self._string(text if self._whole_paths else base_name(text))

    def _string(self, text: str) -> None:
        data = text[: self._limits.element_bytes].encode("utf-8", "surrogatepass")
        self._write("str", len(text).to_bytes(8, "little"), data)

    def _array(self, value: Any) -> None:
        if is_text(value):
            flat = value.reshape(-1)
            self._write("texts", kind_of(value).encode())
            return self._sequence(flat[positions(len(flat), self._limits.rows)].tolist(), 0)
        self._write("array", kind_of(value).encode(), bytes_of(head_of(value, self._limits.element_bytes)))

    def _write(self, kind: str, *parts: bytes) -> None:
        self._taken += _BYTES_PER_VALUE
        for part in (kind.encode(), *parts):
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part)
            self._taken += len(part)


def picked_rows(rows: Any, limits: HashLimits) -> Any:
    """The rows of an array that are hashed: the array itself if it is small."""
    if size_of(rows) <= limits.element_bytes or not len(rows.shape):
        return rows
    affordable = limits.total_bytes // max(1, size_of(rows) // len(rows))
    # All at once: one by one takes ten times as long.
    return rows[positions(len(rows), max(2, min(limits.rows, affordable)))]


def base_name(path: str) -> str:
    """The last part of a path or URL, without a query."""
    return path.replace("\\", "/").partition("?")[0].rstrip("/").rpartition("/")[2]


def is_counter(value: Any, dimensions: int = _MOST_LEVELS) -> bool:
    """Whether a value consists only of whole numbers, which may count steps rather than be data.

    Args:
        value: A batch, or a dataset in memory.
        dimensions: How deep lists may be nested. An array of two dimensions is never a counter.
    """
    if is_array(value):
        return is_whole(value) and len(value.shape) <= min(dimensions, 1)
    if type(value) is dict:
        return all(is_counter(item, dimensions - 1) for item in value.values())
    if type(value) in (list, tuple) or _is_named_tuple(value):
        return dimensions > 0 and all(
            is_counter(value[position], dimensions - 1) for position in positions(len(value), SAMPLE.rows)
        )
    return type(value) in (int, bool, type(None)) or (type(value) is range and dimensions > 0)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and type(value).__bases__ == (tuple,) and hasattr(type(value), "_fields")


def is_shaped(value: Any) -> bool:
    """Whether a value has a shape and an element type, even if its elements cannot be read here."""
    return isinstance(value, torch.Tensor) or is_array(value)


def is_array(value: Any) -> bool:
    """Whether a value is a tensor on the CPU, a numpy array or a numpy number, with plain elements.

    Subclasses of tensors do not count: the elements of a DTensor are on other ranks, too.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return bool(value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized)
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)):
        return False
    return str(value.dtype.kind) in _ARRAY_KINDS


def is_whole(value: Any) -> bool:
    """Whether the elements of a tensor or array are whole numbers or truth values."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return value.dtype.kind in "biu"


def is_text(value: Any) -> bool:
    """Whether the elements of a tensor or array are text."""
    return not isinstance(value, torch.Tensor) and value.dtype.kind == "U"


def kind_of(value: Any) -> str:
    """Class, type of the elements and shape."""
    # The dtype of text contains the length of the longest text, which may be a path on this host.
    kind = "text" if is_text(value) else value.dtype
    return f"{type(value).__name__} {kind} {_shape(value)}"


def size_of(value: Any) -> int:
    """Bytes of all elements."""
    return int(value.dtype.itemsize) * math.prod(_shape(value))


def head_of(value: Any, most: int) -> Any:
    """The beginning of an array, sliced without a copy of the whole."""
    while (size := size_of(value)) > most and len(value.shape):
        length = int(value.shape[0])
        value = value[: max(1, length * most // size)] if length > 1 else value[0]
    return value


def bytes_of(value: Any) -> bytes:
    """The elements as they are in memory."""
    if isinstance(value, torch.Tensor):
        # A view of bytes needs elements side by side: a column of a table, as a row of its own, has them apart.
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return bytes(flat.view(torch.uint8).numpy().tobytes())
    return bytes(value.tobytes())


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in value.shape)
