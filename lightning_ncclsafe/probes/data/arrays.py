"""Tensors and numpy arrays as bytes; numpy is used only where the user has imported it."""

import math
import sys
from typing import Any

import torch

# Not objects, whose bytes are addresses, and not records, whose padding may be anything.
_ARRAY_KINDS = "biufcSUMm"


def is_shaped(value: Any) -> bool:
    """Whether a value has a shape and a type of elements, even if these cannot be read here."""
    return isinstance(value, torch.Tensor) or is_array(value)


def is_array(value: Any) -> bool:
    """Whether a value is a tensor in this host's memory, a numpy array or a numpy number, of plain elements.

    What is derived from a tensor is none: a DTensor's elements cannot be had without asking other ranks.
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
    # The type of text has the length of the longest in it, which may be a path on this host.
    kind = "text" if is_text(value) else value.dtype
    return f"{type(value).__name__} {kind} {_shape(value)}"


def size_of(value: Any) -> int:
    """Bytes of all elements."""
    return int(value.dtype.itemsize) * math.prod(_shape(value))


def head_of(value: Any, most: int) -> Any:
    """The beginning of an array, cut before it is copied: a part of a large one need not be contiguous."""
    while (size := size_of(value)) > most and len(value.shape):
        length = int(value.shape[0])
        value = value[: max(1, length * most // size)] if length > 1 else value[0]
    return value


def bytes_of(value: Any) -> bytes:
    """The elements as they lie in memory."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy().tobytes())
    return bytes(value.tobytes())


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in value.shape)
