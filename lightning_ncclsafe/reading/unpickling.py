"""Reads a pickle that may be hostile: plain data alone, in bounded memory, and nothing that is imported or called.

Python's own unpickler is fast, and a few lines make it refuse what is to be imported. But a pickle of few bytes can
make it reserve gigabytes, for a memo numbered from 4,000,000,000. So the instructions are looked over first.
"""

import io
import pickle
import re
from typing import Any

from lightning_ncclsafe.reading.errors import ReadingError

MOST_BYTES = 64 * 1024 * 1024
"""Of a dump. An entry takes some 200 bytes, its stack as many; PyTorch keeps 2,000 unless told otherwise."""
MOST_CONTAINERS = 5_000_000

# Instructions for plain data whose length is fixed. A memo's number of four bytes must be below 2 to the power of 24.
_FIXED = re.compile(
    rb"(?:[N\x88\x89\])}(teaus\x85-\x87\x94]|[Kqh\x80].|M..|J.{4}|j.{3}\x00|r.{3}\x00|[G\x95].{8}){1,4096}",
    re.DOTALL,
)
# Those with a length of their own, and the length of that: text, bytes, whole numbers.
_COUNTED = {**dict.fromkeys(b"U\x8cC\x8a", 1), **dict.fromkeys(b"TXB\x8b", 4), **dict.fromkeys(b"\x8d\x8e", 8)}
_LENGTHS = {**dict.fromkeys(b"Kqh\x80", 2), ord("M"): 3, **dict.fromkeys(b"Jjr", 5), **dict.fromkeys(b"G\x95", 9)}
_STOP = ord(".")
# For these Python's unpickler asks find_class, which says what was asked for.
_NAMES = b"c\x93i"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ReadingError(f"refused: it would call {module[:80]}.{name[:80]}, and a dump is plain data")


def unpickled(data: bytes) -> Any:
    """The plain data in a pickle: lists, tuples, dictionaries, numbers, text.

    Args:
        data: The pickle.

    Raises:
        ReadingError: If it is damaged, asks for anything to be imported, or would need much memory.
    """
    # What takes some sixty times as much memory as its instruction has bytes. Text may hold these bytes as well.
    if sum(map(data.count, (b"]", b"}", b"\x85"))) > MOST_CONTAINERS:
        raise ReadingError(f"it holds more than {MOST_CONTAINERS:,} lists or dictionaries")
    _look_over(data)
    try:
        # Buffered, as otherwise it asks for the bytes of each instruction anew, which takes three times as long.
        return _PlainUnpickler(io.BufferedReader(io.BytesIO(data))).load()
    except ReadingError:
        raise
    # Whatever a damaged pickle makes of Python's unpickler.
    except Exception as error:
        raise ReadingError(f"it is no whole pickle ({type(error).__name__}: {str(error)[:100]})") from error


def _look_over(data: bytes) -> None:
    """Follows the instructions, doing none, up to the first one that names something to import."""
    position, end = 0, len(data)
    while position < end:
        fixed = _FIXED.match(data, position)
        if fixed:
            position = fixed.end()
            continue
        code = data[position]
        if code == _STOP or code in _NAMES:
            return
        if code not in _COUNTED:
            if end - position < _LENGTHS.get(code, 0):
                break
            raise ReadingError(f"it is no plain data: it has the instruction {bytes([code])!r} at byte {position:,}")
        start = position + 1 + _COUNTED[code]
        position = start + int.from_bytes(data[position + 1 : start], "little")
    raise ReadingError("it is no whole pickle: it has been cut off")
