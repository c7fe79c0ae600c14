"""How the calls of a logger are captured: methods are replaced, and arguments copied."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_ncclsafe.loggers.intake import LoggedCall

# Values are never nested deeper, except for a list that holds itself.
_DEEPEST = 20
# About the memory of a number in a list.
_ITEM_BYTES = 32


def copied_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool, is_media: bool = False
) -> LoggedCall:
    """A call to make later, with copies of its arguments."""
    copied = ArgumentCopier()
    return LoggedCall(
        name=name,
        args=copied.copy(args),
        kwargs=copied.copy(kwargs),
        data_bytes=copied.data_bytes,
        keep=keep,
        is_media=is_media,
        events=tuple(copied.events),
    )


@dataclass(slots=True)
class ArgumentCopier:
    """Copies arguments as they are at the moment of a call, and counts what the copies hold.

    Attributes:
        data_bytes: Memory of the copies.
        events: CUDA events after which the copies of device tensors are complete.
    """

    data_bytes: int = 0
    events: list[Any] = field(default_factory=list)

    def copy(self, value: Any, depth: int = 0) -> Any:
        """Copies tensors, arrays, images and the lists, tuples and dicts that hold them; all else stays as it is."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            self.data_bytes += value.nbytes
            return value.copy()
        if isinstance(value, (str, bytes, bytearray)):
            self.data_bytes += len(value)
            return bytes(value) if isinstance(value, bytearray) else value
        if depth < _DEEPEST and isinstance(value, (list, tuple, set, dict)):
            self.data_bytes += _ITEM_BYTES * len(value)
            return self._collection(value, depth + 1)
        if type(value).__module__.startswith("PIL."):
            self.data_bytes += 4 * value.width * value.height
            return value.copy()
        return value

    def _collection(self, value: Any, depth: int) -> Any:
        if type(value) in (list, tuple, set):
            return type(value)(self.copy(item, depth) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.copy(item, depth) for item in value))
        if isinstance(value, dict):
            # Also an OrderedDict or a defaultdict, with everything else that its class holds.
            copied = value.copy()
            copied.update({key: self.copy(item, depth) for key, item in value.items()})
            return copied
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self.data_bytes += tensor.nelement() * tensor.element_size()
        try:
            copied = tensor.detach().clone()
        except torch.OutOfMemoryError:
            # The device has no memory to spare: the copy waits for it, as Lightning's own does.
            return tensor.detach().to("cpu", copy=True)
        if copied.is_cuda:
            # Waiting here would stop the training thread until the device has caught up.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(copied.device))
            self.events.append(event)
        return copied
