"""Arguments as they are at the moment of a call: what the caller may change afterwards is copied."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

# Deeper than this nobody nests what is logged; a list that holds itself is.
_DEEPEST = 20
# About what a number in a list takes.
_ITEM_BYTES = 32


@dataclass(slots=True)
class Copied:
    """What copying has seen.

    Attributes:
        data_bytes: How much memory the copies hold.
        events: CUDA events after which the copies of tensors on devices are there.
    """

    data_bytes: int = 0
    events: list[Any] = field(default_factory=list)

    def copy(self, value: Any, depth: int = 0) -> Any:
        """Copies tensors, arrays, images and the lists, tuples and dicts that they are in; all else as it is."""
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
            # Also an OrderedDict or a defaultdict; what else its class knows is kept.
            copied = value.copy()
            copied.update({key: self.copy(item, depth) for key, item in value.items()})
            return copied
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self.data_bytes += tensor.nelement() * tensor.element_size()
        try:
            copied = tensor.detach().clone()
        except torch.OutOfMemoryError:
            # The device has no room to spare: its copy waits for what it computes, as Lightning's own does.
            return tensor.detach().to("cpu", copy=True)
        if copied.is_cuda:
            # Not waited for here: that would stop the training thread until the device has caught up.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(copied.device))
            self.events.append(event)
        return copied
