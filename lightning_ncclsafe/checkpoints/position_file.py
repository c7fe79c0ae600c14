"""A rank's position in its data, for other ranks of its host to read when it is killed, stopped or stuck.

Each rank keeps its position in a memory-mapped file, which outlives the process; a write copies some kilobytes. There
are two slots, and a write goes to the older one, so that one of them is always complete.
"""

import json
import mmap
import os
import struct
import tempfile
import time
import zlib
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

# Number of the writing, length and checksum of what follows.
_HEADER = struct.Struct("<QII")
# For random states of some kilobytes, three times, and the states of the training's loaders.
_ROOM = 1 << 18
_TENSOR, _TUPLE, _WORDS, _MAPPING = "\0tensor", "\0tuple", "\0words", "\0mapping"
_DTYPES = {"uint8": torch.uint8, "int64": torch.int64}
_PREFIX, _OLD_S = "ncclsafe-position-", 3600.0
# Longer tuples are states of generators.
_SHORT = 64


class PositionFile:
    """The file of one rank.

    Attributes:
        path: Its path.

    Raises:
        OSError: There is no room for the file.
    """

    def __init__(self, rank: int) -> None:
        _clear()
        handle, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-{rank}-")
        self.path = Path(name)
        try:
            # If blocks were not allocated now, a full disk would kill the process when it writes.
            os.posix_fallocate(handle, 0, 2 * _ROOM)
            self._memory = mmap.mmap(handle, 2 * _ROOM)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(handle)
        self._number = self._place = 0
        self._kept: Known = {}

    def write(self, position: Mapping[str, Any], *, over_last: bool = False) -> None:
        """Writes a position to the older slot; nothing if it is too large, or not plain data.

        Args:
            over_last: Whether to overwrite the last one instead.
        """
        # How an epoch began does not change: it is packed only once.
        used: Known = {}
        try:
            content = packed(position, self._kept, used)
        except (TypeError, ValueError, OverflowError):
            content = b""
        self._kept = used
        if len(content) > _ROOM - _HEADER.size:
            content = b""
        self._number += 1
        self._place = self._place if over_last else 1 - self._place
        start = self._place * _ROOM
        self._memory[start + _HEADER.size : start + _HEADER.size + len(content)] = content
        self._memory[start : start + _HEADER.size] = _HEADER.pack(self._number, len(content), zlib.crc32(content))

    def close(self) -> None:
        """Removes the file."""
        self._memory.close()
        with suppress(OSError):
            self.path.unlink()


def _clear() -> None:
    """Removes files of processes that ended long ago: no run resumes from them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            pid = int(path.name.removeprefix(_PREFIX).partition("-")[0])
            if path.stat().st_mtime < time.time() - _OLD_S and not psutil.pid_exists(pid):
                path.unlink()


def read_position(path: Path, step: int) -> dict[str, Any] | None:
    """The last complete position that a rank has written after an optimizer step; None if there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            content = file.read(2 * _ROOM)
    except OSError:
        return None
    found = []
    for start in (0, _ROOM):
        part = content[start : start + _ROOM]
        if len(part) >= _HEADER.size:
            number, length, checksum = _HEADER.unpack_from(part)
            body = part[_HEADER.size : _HEADER.size + length]
            if number and len(body) == length and zlib.crc32(body) == checksum:
                found.append((number, body))
    for _, body in sorted(found, reverse=True):
        with suppress(ValueError, TypeError, KeyError, IndexError, RecursionError, struct.error):
            position = unpacked(body)
            if isinstance(position, dict) and position.pop("step", None) == step:
                return position
    return None


Known = dict[int, tuple[Any, bytes]]
"""Mappings that never change, with their bytes, by identity; the mappings themselves are kept alive."""


def packed(value: Any, known: Known | None = None, used: Known | None = None) -> bytes:
    """Plain data with tensors as bytes: small values as JSON, long ones as they are in memory.

    Args:
        known: Mappings in it that were packed before.
        used: Receives the mappings in it, with their bytes.

    Raises:
        TypeError, ValueError, OverflowError: Something in it cannot be packed.
    """
    blobs: list[bytes] = []
    header = json.dumps(_plain(value, blobs, known or {}, {} if used is None else used)).encode()
    lengths = [len(header), *map(len, blobs)]
    return b"".join([struct.pack(f"<I{len(lengths)}I", len(lengths), *lengths), header, *blobs])


def unpacked(content: bytes) -> Any:
    """What was packed.

    Raises:
        ValueError, TypeError, KeyError, IndexError, struct.error: The content is damaged.
    """
    (count,) = struct.unpack_from("<I", content)
    lengths = struct.unpack_from(f"<{count}I", content, 4)
    parts, start = [], 4 + 4 * count
    for length in lengths:
        parts.append(content[start : start + length])
        start += length
    return _restored(json.loads(parts[0]), parts[1:])


def _plain(value: Any, blobs: list[bytes], known: Known, used: Known, *, is_inner: bool = False) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES or value.dim() != 1:
            raise TypeError(f"a tensor of {name} with {value.dim()} dimensions")
        blobs.append(value.cpu().numpy().tobytes())
        return {_TENSOR: [name, len(blobs) - 1]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key that is no text")
        if is_inner and not any(isinstance(item, (dict, list)) for item in value.values()):
            blobs.append(known[id(value)][1] if id(value) in known else packed(value))
            used[id(value)] = value, blobs[-1]
            return {_MAPPING: len(blobs) - 1}
        return {key: _plain(item, blobs, known, used, is_inner=True) for key, item in value.items()}
    if isinstance(value, tuple) and len(value) > _SHORT:
        blobs.append(array("Q", value).tobytes())
        return {_WORDS: len(blobs) - 1}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item, blobs, known, used, is_inner=True) for item in value]}
    return [_plain(item, blobs, known, used, is_inner=True) for item in value] if isinstance(value, list) else value


def _restored(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_restored(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        name, number = value[_TENSOR]
        return torch.frombuffer(bytearray(blobs[number]), dtype=_DTYPES[name])
    if _MAPPING in value:
        return unpacked(blobs[value[_MAPPING]])
    if _WORDS in value:
        return tuple(array("Q", blobs[value[_WORDS]]))
    if _TUPLE in value:
        return tuple(_restored(item, blobs) for item in value[_TUPLE])
    return {key: _restored(item, blobs) for key, item in value.items()}
