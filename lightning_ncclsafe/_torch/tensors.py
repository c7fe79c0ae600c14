"""Tensors of a model and of optimizers: how often they changed, copied to the host, saved and read."""

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import torch


def spread_size(parameter: Any) -> tuple[int, int] | None:
    """Elements of a DTensor: of all ranks together, and of this one; None for a tensor that is not spread."""
    local = getattr(parameter, "_local_tensor", None)
    return None if local is None else (int(parameter.numel()), int(local.numel()))


def largest(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each: any order of comparing gives the same, and the device is not waited for."""
    with torch.no_grad():
        # A split tensor would ask other ranks.
        own = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
        return [each.abs().max() if each.numel() and each.dtype is not torch.bool else each.sum() for each in own]


def change_counts(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each has been changed in place: torch counts that for autograd, but for writes through ``.data``.

    A DTensor and the part that it is around each count only what they were told to do themselves.
    """
    return [tensor._version for tensor in tensors]


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Of each buffer that is saved with a module: its whole name, where it is kept, and under which name."""
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), part._buffers, name


def copy_all(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copies tensors into others, in one call."""
    with torch.no_grad():
        torch._foreach_copy_(copies, tensors)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, and as what; two views that are the same have the same."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def queue_event() -> torch.cuda.Event:
    """An event behind all that the calling thread has queued on its device until now."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def to_host(value: Any) -> Any:
    """A copy of nested containers with all tensors on the host: over a stream that waits for no other one.

    What is queued on the device meanwhile, and may never run, is not waited for.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.cuda.stream(stream):
        return _to_host(value)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A tensor of the host's is copied, too: it may change before it is written.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update({key: _to_host(each) for key, each in value.items()})
        return moved
    if type(value) in (list, tuple, set):
        return type(value)(map(_to_host, value))
    return value


def save(value: Any, file: BinaryIO) -> None:
    """Writes a value as ``torch.load`` reads it."""
    torch.save(value, file)


def load_plain(file: Any) -> Any:
    """Reads tensors and plain data, and nothing that could run; the tensors of a path are not read for that."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, (str, os.PathLike)) or None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: itself, and not a copy."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def is_tensor(value: Any) -> bool:
    """Whether it is one."""
    return isinstance(value, torch.Tensor)
