"""Tensors of a model and its optimizers: counts of changes, copies to the host, saving and loading."""

import copy
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch


def spread_size(parameter: Any) -> tuple[int, int] | None:
    """Elements of a DTensor: on all ranks together, and on this one; None for an ordinary tensor."""
    local = getattr(parameter, "_local_tensor", None)
    return None if local is None else (int(parameter.numel()), int(local.numel()))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, not copied."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


_COMPARED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def largest(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each, which does not depend on the order; does not wait for the device.

    For one-byte types the largest byte. Copies no tensor.
    """
    with torch.no_grad():
        # A sharded tensor would communicate with other ranks.
        return [_largest(each) if each.numel() else each.sum() for each in map(local_part, tensors)]


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize == 1 or not tensor.dtype.is_floating_point:
        # Torch can compare only few of its dtypes.
        tensor = tensor.view(_COMPARED[tensor.dtype.itemsize])
    least, most = torch.aminmax(tensor)
    return torch.maximum(-least, most) if tensor.dtype.is_signed else most


def change_counts(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was changed in place: torch counts that for autograd, except writes through ``.data``.

    A DTensor and its local tensor each count only their own operations.
    """
    return [tensor._version for tensor in tensors]


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The address of each: assigning to ``.data`` puts another tensor there, which does not count as a change."""
    return [tensor.data_ptr() for tensor in tensors]


def saved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each buffer that is saved with a module: its whole name, its owner, and its name there."""
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), part._buffers, name


def copy_all(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copies tensors into others, in one call."""
    with torch.no_grad():
        torch._foreach_copy_(copies, tensors)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's place in memory, with dtype, shape and strides; equal for equal views."""
    tensor = local_part(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def queue_event() -> torch.cuda.Event:
    """An event after everything that the calling thread has queued on its device."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def beside_others(device: Any) -> Iterator[None]:
    """Makes the calling thread use its own stream on a device, which waits for no other stream.

    So it does not wait for work of others, which may never run. Without this, a thread uses the first device, and a
    copy from any device to the host waits for everything queued there.
    """
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def to_host(value: Any) -> Any:
    """A copy of nested containers with all tensors on the host; see :func:`beside_others`."""
    with torch.no_grad():
        return _to_host(value)


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A tensor on the host is copied, too: it may change before it is written.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update({key: _to_host(each) for key, each in value.items()})
        return moved
    if type(value) in (list, tuple, set):
        return type(value)(map(_to_host, value))
    return value


def save(value: Any, file: BinaryIO) -> None:
    """Writes a value for ``torch.load``."""
    torch.save(value, file)


def load_plain(file: BinaryIO) -> Any:
    """Reads tensors and plain data only, nothing executable."""
    return torch.load(file, map_location="cpu", weights_only=True)


class _Left:
    """A placeholder for an object that is left out: accepts everything its pickle does, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "_Left":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _take(self, *_: Any) -> "_Left":
        return self

    __call__ = __setstate__ = __setitem__ = append = extend = add = _take


class Outlined:
    """A placeholder for a tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __setstate__(self, state: Any) -> None:
        pass


_OUTLINED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, size, *_: Outlined(tuple(size)),
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
}


class _OutlineUnpickler(pickle.Unpickler):
    """Imports nothing, and calls nothing outside of this file."""

    def find_class(self, module: str, name: str) -> Any:
        return _OUTLINED.get((module, name), _Left)

    def persistent_load(self, pid: Any) -> Any:
        return None


def load_outline(path: str | os.PathLike[str]) -> Any:
    """The outline of a file of ``torch.save``: plain data, and the shapes of tensors; everything else is left out.

    Unlike ``torch.load(weights_only=True)`` it reads a file with objects of any class, for instance a path among the
    hyperparameters; those are left out.

    Raises:
        OSError, zipfile.BadZipFile: If it is no such file.
        Exception: If it is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
        return _OutlineUnpickler(io.BytesIO(archive.read(name))).load()


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value, torch.Tensor)
