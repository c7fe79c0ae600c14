"""Making one checkpoint of what several ranks have written, or saying what is missing: plain data, no tensors.

What ranks say of their files is checked, not believed: that all name the same tensors, that the chunks of each cover it
once and entirely, and that what all have alike is alike.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lightning_ncclsafe._torch.sharded import StoredChunk, StoredEntry
from lightning_ncclsafe.checkpoints.boundary import NotProvenError
from lightning_ncclsafe.checkpoints.shards import Box, Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank has written.

    Attributes:
        size: Bytes of its file.
        chunks: What is in it.
        error: Why there is none; empty if there is one.
    """

    size: int = 0
    chunks: tuple[Chunk, ...] = ()
    error: str = ""


def file_of(rank: int) -> str:
    """The name of a rank's file, as PyTorch names it."""
    return f"__{rank}_0.distcp"


def joined(shares: Mapping[int, Share], expected: Iterable[str]) -> list[StoredEntry]:
    """The entries of the checkpoint that ranks have written together.

    Args:
        shares: What each rank has written.
        expected: Paths of entries that have to be there.

    Raises:
        NotProvenError: They do not make one; the message says which rank, or which tensor.
    """
    found: dict[str, list[tuple[int, Chunk]]] = {}
    for rank, share in sorted(shares.items()):
        if share.error:
            raise NotProvenError(f"rank {rank}: {share.error}")
        for chunk in share.chunks:
            if chunk.begin < 0 or chunk.length <= 0 or chunk.begin + chunk.length > share.size:
                raise NotProvenError(f"rank {rank}: a shard of {chunk.path} lies outside of its file")
            found.setdefault(chunk.path, []).append((rank, chunk))
    if missing := [path for path in expected if path not in found]:
        raise NotProvenError(f"no rank saved {_dotted(_name(missing[0]))!r}")
    return [_entry(path, chunks) for path, chunks in found.items()]


def _entry(path: str, chunks: Sequence[tuple[int, Chunk]]) -> StoredEntry:
    name = _name(path)
    (_, first) = chunks[0]
    for rank, chunk in chunks[1:]:
        if (chunk.shape, chunk.dtype, chunk.digest) != (first.shape, first.dtype, first.digest):
            raise NotProvenError(f"{_dotted(name)!r} differs between rank {chunks[0][0]} and rank {rank}")
    # Replicas of the same part: the lowest rank's is taken.
    by_place = {chunk.offsets: (rank, chunk) for rank, chunk in reversed(chunks)}
    if problem := why_not_covered(first.shape, [(chunk.offsets, chunk.sizes) for _, chunk in by_place.values()]):
        raise NotProvenError(f"{_dotted(name)!r} {problem}")
    stored = [
        StoredChunk(chunk.offsets, chunk.sizes, file_of(rank), chunk.begin, chunk.length)
        for _, (rank, chunk) in sorted(by_place.items())
    ]
    return StoredEntry(name, first.shape, first.dtype, stored)


def _name(path: str) -> tuple[str | int, ...]:
    found = json.loads(path)
    if not isinstance(found, list) or not found or not all(type(part) in (str, int) for part in found):
        raise NotProvenError(f"{path!r:.60} is not a path of an entry")
    return tuple(found)


def _dotted(name: Sequence[str | int]) -> str:
    return ".".join(map(str, name))


def why_not_covered(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Why these boxes are not the whole of a tensor, each value once, in words; empty if they are.

    Args:
        shape: Of the tensor.
        boxes: In any order.
    """
    ordered, volume = sorted(boxes), 0
    active: list[Box] = []
    for offsets, sizes in ordered:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return "has a shard with other dimensions"
        if any(
            offset < 0 or size < 0 or offset + size > whole
            for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            return "has a shard outside of it"
        # In the order of the first dimension only those that reach that far can overlap.
        active = [box for box in active if box[0][0] + box[1][0] > offsets[0]] if shape else active
        if any(_overlap((offsets, sizes), box) for box in active):
            return "has shards that overlap"
        active.append((offsets, sizes))
        volume += prod(sizes)
    whole = prod(shape)
    return "" if volume == whole and ordered else f"is not complete: {volume:,} of its {whole:,} values were saved"


def _overlap(one: Box, other: Box) -> bool:
    return all(
        begin < other_begin + other_size and other_begin < begin + size
        for begin, size, other_begin, other_size in zip(*one, *other, strict=True)
    )
