"""One checkpoint that several ranks write, each its own shard: a folder in PyTorch's distributed checkpoint format.

The first rank makes the folder; the others write their files to it and publish what is in them. The first rank checks
that all shards together are the whole model, writes the index, and renames the folder last: it is complete or absent.

The other ranks' lists are checked, not trusted: all must name the same tensors, the chunks of each tensor must cover it
exactly once, and what all ranks have must be equal.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from lightning_ncclsafe._torch import sharded, tensors
from lightning_ncclsafe._torch.sharded import StoredChunk, StoredEntry
from lightning_ncclsafe.checkpoints.boundary import Boundary, NotProvenError
from lightning_ncclsafe.checkpoints.folder import KEY, METADATA, REST, CheckpointFolder, read_back, write_synced
from lightning_ncclsafe.checkpoints.ledger import StepLedger
from lightning_ncclsafe.checkpoints.shards import Box, Chunk, entry_paths, pieces_of, write_pieces
from lightning_ncclsafe.exchange import Exchange, wait_for, wait_for_keys
from lightning_ncclsafe.facts import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The file that one rank has written.

    Attributes:
        size: Its length, bytes.
        chunks: Its contents.
        error: Why there is no file; empty if there is one.
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
        shares: The file of each rank.
        expected: Paths of entries that must exist.

    Raises:
        NotProvenError: The files do not make a checkpoint; the message names the rank or the tensor.
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
    # If several ranks have the same part, the lowest rank's is used.
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
    """Why these boxes do not cover a tensor exactly once, in words; empty if they do."""
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
        # Sorted by the first dimension, only boxes that reach that far can overlap.
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


_FOLDER = "checkpoint/folder"
# For the removal of an incomplete checkpoint in which another rank still writes.
_REMOVED_S = 1.0
# Longest list of a rank's chunks, decompressed.
_MOST_BYTES = 1 << 28


class ShardedSave:
    """One rank's part in such a checkpoint.

    Args:
        ranks: The ranks that write, the leader first.
        left_s: Gives the remaining time, seconds.
        may_finish: Called before the rename; may raise to stop the save.
    """

    def __init__(
        self,
        exchange: Exchange,
        folder: CheckpointFolder,
        ledger: StepLedger,
        boundary: Boundary,
        rank: int,
        ranks: Sequence[int],
        *,
        left_s: Callable[[], float],
        may_finish: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._folder = folder
        self._ledger = ledger
        self._boundary = boundary
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._left_s = left_s
        self._may_finish = may_finish

    def follow(self, state: Callable[[], dict[str, Any]]) -> None:
        """Writes this rank's file, and publishes what is in it, or why there is none.

        Raises:
            ExchangeError: Publishing failed.
        """
        found = wait_for_keys(self._exchange, [_FOLDER], deadline_s=self._left_s())
        # Empty if the first rank has called the save off.
        if not (name := found.get(_FOLDER, b"").decode()):
            return
        try:
            share = self._write(self._folder.seen_together(name), state(), is_first=False)
        except Exception as error:
            share = Share(error=failure_words(error))
        self._exchange.set(_key(self._rank), zlib.compress(codec.encode(share), 1))

    def lead(self, state_and_rest: Callable[[], tuple[dict[str, Any], dict[str, Any]]]) -> Path:
        """Makes the folder, writes this rank's file and the common files, and renames the folder.

        Args:
            state_and_rest: Gives the state on this rank, and what else Lightning saves.

        Returns:
            Its path.

        Raises:
            NotProvenError: The files of the ranks do not make a checkpoint.
            OSError: Storage failed, or did not keep a file.
            Exception: Whatever the functions raise.
        """
        partial = self._folder.begin_together()
        try:
            self._exchange.set(_FOLDER, partial.name.encode())
            state, rest = state_and_rest()
            shares = {self._rank: self._write(partial, state, is_first=True)}
            shares |= self._shares_of_others()
            files = {file_of(rank): share.size for rank, share in shares.items()}
            metadata = sharded.distributed_metadata(joined(shares, entry_paths(state)))
            files[METADATA] = write_synced(partial / METADATA, lambda file: file.write(metadata))
            rest[KEY]["files"] = files
            rest = tensors.to_host(rest) if self._ledger.is_on_device else rest
            read_back(partial / REST, write_synced(partial / REST, lambda file: tensors.save(rest, file)))
            if (partial / METADATA).read_bytes() != metadata:
                raise OSError(f"{METADATA} differs from what was written")
            self._may_finish()
            return self._folder.finish_together(partial, self._boundary.epoch, self._boundary.step, files)
        except BaseException:
            # Once more if another rank has begun its file there meanwhile; in a folder that is gone, none can.
            wait_for(lambda: _is_removed(partial), deadline_s=_REMOVED_S)
            raise

    def call_off(self) -> None:
        """Announces that the first rank will not begin, unless it has, so that no rank waits.

        Raises:
            ExchangeError: The announcement failed.
        """
        self._exchange.set_if_absent(_FOLDER, b"")

    def _write(self, partial: Path, state: dict[str, Any], *, is_first: bool) -> Share:
        pieces = pieces_of(state, is_first=is_first)
        if self._ledger.is_on_device:
            # Once it is on the host, it cannot change any more.
            values = tensors.to_host([piece.values for piece in pieces])
            pieces = [replace(piece, values=value) for piece, value in zip(pieces, values, strict=True)]
            self._ledger.check(self._boundary)
        found: list[Chunk] = []
        path = partial / file_of(self._rank)
        size = write_synced(path, lambda file: found.extend(write_pieces(pieces, file)))
        if path.stat().st_size != size:
            raise OSError(f"{size:,} bytes were written, {path.stat().st_size:,} are there")
        if not self._ledger.is_on_device:
            self._ledger.check(self._boundary)
        return Share(size=size, chunks=tuple(found))

    def _shares_of_others(self) -> dict[int, Share]:
        keys = {_key(rank): rank for rank in self._others}
        found = wait_for_keys(self._exchange, keys, deadline_s=self._left_s())
        late = [str(rank) for key, rank in keys.items() if key not in found]
        if late:
            raise TimeoutError(f"rank {', '.join(late)} did not write its shard in time")
        return {keys[key]: _read(content, keys[key]) for key, content in found.items()}


def _is_removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def failure_words(error: Exception) -> str:
    """Why nothing was saved, in one line."""
    if isinstance(error, (NotProvenError, TimeoutError)):
        return str(error)
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _key(rank: int) -> str:
    return f"checkpoint/share/{rank}"


def _read(content: bytes, rank: int) -> Share:
    try:
        unpacking = zlib.decompressobj()
        return codec.decode(Share, unpacking.decompress(content, _MOST_BYTES))
    except (zlib.error, codec.DecodeError) as error:
        raise NotProvenError(f"what rank {rank} reports about its shard cannot be read: {error}") from error
