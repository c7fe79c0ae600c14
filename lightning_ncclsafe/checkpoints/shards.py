"""One rank's shard of a model, read without a collective, with the names of PyTorch's checkpoints.

``state_dict`` cannot be used: in it, FSDP gathers whole parameters, and FSDP2 reshards parameters that the main thread
may be using. The tensors that an optimizer changes always exist, and each rank knows their place in the whole model:
with FSDP2, a shard is a box of the tensor; with FSDP, a range of values, which is a few boxes.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any, BinaryIO

from lightning_ncclsafe._torch import sharded, tensors
from lightning_ncclsafe.checkpoints.boundary import NotProvenError
from lightning_ncclsafe.checkpoints.weights import WatchedParameter

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: its offsets and its sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of one entry of a checkpoint that a rank has written.

    Attributes:
        path: The path of the entry in the nested state, as JSON.
        shape: The shape of the whole tensor.
        dtype: Torch's name of the type; empty if it is not a tensor.
        offsets: The position of the chunk in the tensor.
        sizes: Its sizes.
        begin: Its offset in the rank's file, bytes.
        length: Its length there, bytes.
        digest: A digest of the content if every rank has the whole entry; 0 if each has a part.
    """

    path: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    begin: int = 0
    length: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk to write, with its values; split if other ranks have other chunks of the entry."""

    chunk: Chunk
    values: Any
    is_split: bool = False


class SplitTensor:
    """A range of a tensor's values on this rank, as FSDP keeps parameters and optimizer states.

    Args:
        shape: The shape of the whole tensor.
        begin: The flat index of the first value.
        values: The values on this rank, flat.
    """

    def __init__(self, shape: Sequence[int], begin: int, values: Any) -> None:
        self.shape = tuple(shape)
        self.values = values
        self.boxes = boxes_of_range(self.shape, begin, begin + values.numel())


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes that make up a range of a tensor's values, in order: full rows, and parts of the first and last row.

    Args:
        begin: The flat index of the first value.
        end: The flat index after the last value.
    """
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return _within(shape, last, begin - last * row, end - last * row)
    boxes = _within(shape, first - 1, begin - (first - 1) * row, row) if begin < first * row else []
    if first < last:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + (_within(shape, last, 0, end - last * row) if last * row < end else [])


def _within(shape: Sequence[int], row: int, begin: int, end: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes_of_range(shape[1:], begin, end)]


class OwnShard:
    """One rank's shard of a model, known from the beginning of ``fit``. Made on the main thread, between batches.

    Args:
        model: The model of the strategy: wrapped by FSDP, or with parameters split by FSDP2 or tensor parallelism.

    Attributes:
        layout: A digest of the shard's place in the model: equal on ranks with the same shard.
        model_key: The key of the model's state in the checkpoint.
        parts: The local tensors of each parameter, which count changes: a DTensor, and its local tensor.
        why_unread: Why the model cannot be read, in words; empty if it can.
    """

    def __init__(self, model: Any) -> None:
        self.parts: list[WatchedParameter] = []
        self.layout = self.why_unread = ""
        try:
            self._find(model)
        except (NotProvenError, sharded.UnknownSplitError) as error:
            self.why_unread = str(error)

    def _find(self, model: Any) -> None:
        flat = {part.name: part for part in sharded.flat_parts(model)}
        self._flat = {id(part.parameter): part for part in flat.values()}
        self.model_key = "model" if flat else "state_dict"
        parameters = {name: part.parameter for name, part in flat.items()} or sharded.split_parameters(model)
        self._buffers = {name: (owner, key) for name, owner, key in sharded.plain_buffers(model)}
        self._parameters = parameters
        odd = sharded.saved_names(model, is_flat=bool(flat)) ^ {*parameters, *self._buffers}
        if odd:
            raise NotProvenError(f"the format in which the model saves its state is unknown: {min(odd)!r}")
        self._names: dict[int, str] = {}
        for name, parameter in parameters.items():
            self._names.setdefault(id(parameter), name)
        for name, parameter in parameters.items():
            part = self._flat.get(id(parameter))
            if part is not None:
                self.parts.append(WatchedParameter(name, parameter, part.values))
                continue
            values = partial(tensors.local_part, parameter)
            self.parts += [WatchedParameter(name, each, values) for each in (parameter, values())]
        places = []
        for name, value in self._weights().items():
            shape, boxes, _ = _split(value) or (tuple(value.shape), [], None)
            places.append((name, shape, boxes))
        self.layout = hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]
        sharded.import_checkpointing()

    def _weights(self) -> dict[str, Any]:
        found = dict(self._parameters)
        for name, parameter in found.items():
            if (part := self._flat.get(id(parameter))) is not None:
                found[name] = SplitTensor(part.shape, part.begin, part.values())
        return found

    def weights(self) -> dict[str, Any]:
        """The state of the model, with the very tensors that are being trained."""
        return self._weights() | {name: owner[key] for name, (owner, key) in self._buffers.items()}

    def optimizer_state(self, optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of an optimizer, by the parameters' names, as PyTorch's checkpoints have it.

        Args:
            optimizer: The optimizer, or Lightning's around it.
            groups: The settings of its groups at the boundary.

        Raises:
            NotProvenError: The state is split in an unknown way.
        """
        inner = getattr(optimizer, "_optimizer", optimizer)
        state = inner.state_dict()
        parameters = [*chain.from_iterable(group["params"] for group in inner.param_groups)]
        unknown = [parameter for parameter in parameters if id(parameter) not in self._names]
        if unknown:
            raise NotProvenError(f"{type(inner).__name__} has {len(unknown)} parameters that are not in the model")
        names = [self._names[id(parameter)] for parameter in parameters]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        name_of = dict(zip(numbers, names, strict=True))
        known = dict(zip(numbers, parameters, strict=True))
        return {
            "state": {
                name_of[number]: {key: self._part_of_state(known[number], value) for key, value in values.items()}
                for number, values in state["state"].items()
            },
            "param_groups": [
                {**group, **settings, "params": [name_of[number] for number in group["params"]]}
                for group, settings in zip(state["param_groups"], groups, strict=True)
            ],
        }

    def _part_of_state(self, parameter: Any, value: Any) -> Any:
        """Applies FSDP's own rule: a state with dimensions is split like its parameter."""
        part = self._flat.get(id(parameter))
        if part is None or not getattr(value, "ndim", 0):
            return value
        if value.numel() != part.numel:
            raise NotProvenError(f"the optimizer has {value.numel()} values for the {part.numel} of {part.name!r}")
        return SplitTensor(part.shape, part.begin, value)


def entry_paths(state: Mapping[str, Any]) -> list[str]:
    """The paths of all entries of a nested state, as :class:`Chunk` has them."""
    return [json.dumps(path) for path, _ in sharded.flattened(state)]


def pieces_of(state: Mapping[str, Any], *, is_first: bool) -> list[Piece]:
    """The part of a nested state that one rank writes, with the names of PyTorch's checkpoints.

    Args:
        state: The states of the model and the optimizers.
        is_first: Whether the rank also writes what all ranks have.

    Raises:
        NotProvenError: A tensor would have to be summed over ranks first.
    """
    found: list[Piece] = []
    for path, value in sharded.flattened(state):
        name = json.dumps(path)
        split = _split(value)
        if split is not None:
            shape, boxes, values = split
            if is_first and not prod(shape):
                boxes = [(tuple(0 for _ in shape), shape)]
            found += _pieces_of_tensor(name, shape, boxes, values)
        # Each rank has optimizer states of its own parameters, which other ranks may not have.
        elif is_first or path[1] == "state":
            found.append(_whole_piece(name, value))
    return found


def _split(value: Any) -> tuple[tuple[int, ...], list[Box], Any] | None:
    """Shape of the whole, boxes and values of a split tensor; None for anything else."""
    if isinstance(value, SplitTensor):
        return value.shape, value.boxes, value.values
    try:
        return sharded.split_of(value)
    except sharded.UnknownSplitError as error:
        raise NotProvenError(str(error)) from error


def _pieces_of_tensor(name: str, shape: tuple[int, ...], boxes: Sequence[Box], values: Any) -> Iterator[Piece]:
    flat, begin = values.detach().reshape(-1), 0
    if flat.numel() != sum(prod(sizes) for _, sizes in boxes):
        raise NotProvenError(f"this rank has {flat.numel()} values of {name}, which do not fill its shard")
    dtype = str(values.dtype).removeprefix("torch.")
    for offsets, sizes in boxes:
        count = prod(sizes)
        part = flat[begin : begin + count].view(sizes)
        begin += count
        if count or not prod(shape):
            chunk = Chunk(path=name, shape=shape, dtype=dtype, offsets=offsets, sizes=sizes)
            yield Piece(chunk=chunk, values=part, is_split=True)


def _whole_piece(name: str, value: Any) -> Piece:
    if not tensors.is_tensor(value):
        return Piece(chunk=Chunk(path=name), values=value)
    shape = tuple(value.shape)
    dtype = str(value.dtype).removeprefix("torch.")
    chunk = Chunk(path=name, shape=shape, dtype=dtype, offsets=tuple(0 for _ in shape), sizes=shape)
    return Piece(chunk=chunk, values=value.detach())


def write_pieces(pieces: Sequence[Piece], file: BinaryIO) -> tuple[Chunk, ...]:
    """Writes pieces one after another, each as ``torch.save`` does; returns their places.

    Args:
        pieces: The pieces, on the host.
        file: An empty file.
    """
    written = []
    for piece in pieces:
        begin, digest = file.tell(), 0
        if piece.is_split:
            sharded.save_part(piece.values, file)
        else:
            content = io.BytesIO()
            sharded.save_part(piece.values, content)
            digest = zlib.crc32(content.getbuffer()) or 1
            file.write(content.getbuffer())
        written.append(replace(piece.chunk, begin=begin, length=file.tell() - begin, digest=digest))
    return tuple(written)
