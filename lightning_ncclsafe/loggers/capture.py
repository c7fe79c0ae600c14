"""How what a logger is given is caught: methods are replaced, arguments copied, the scalars of one call collected."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_ncclsafe.code.patching import ReplacedMethod
from lightning_ncclsafe.loggers.intake import Scalars

FIRST_S = 0.5
"""How long the first log waits for its file: who looks whether there is one finds it, as without an offload."""
# Deeper than this nobody nests what is logged; a list that holds itself is.
_DEEPEST = 20
# About what a number in a list takes.
_ITEM_BYTES = 32


class Replacements:
    """Methods of a logger and of its experiment that are replaced for a while."""

    def __init__(self) -> None:
        self._replaced: list[ReplacedMethod] = []

    def replace(self, owner: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces a method; returns the one that was there.

        Raises:
            AttributeError: If the owner does not have it, or does not let it be replaced.
        """
        replaced = ReplacedMethod(owner, name, call)
        # At once, so that it is undone when the next one fails.
        self._replaced.append(replaced)
        return replaced.original

    def undo(self) -> None:
        """All methods are as they were."""
        while self._replaced:
            self._replaced.pop().remove()


class Collecting(threading.local):
    """Collects the scalars of one call of ``log_metrics``, on each thread for itself."""

    def __init__(self) -> None:
        self._found: list[Scalars] | None = None

    @property
    def is_on(self) -> bool:
        """Whether this thread is in such a call."""
        return self._found is not None

    @contextmanager
    def scalars(self) -> Iterator[list[Scalars]]:
        """What is collected within it, in order. A call within a call leaves everything to the outer one."""
        if self._found is not None:
            yield []
            return
        self._found = []
        try:
            yield self._found
        finally:
            self._found = None

    def call(self, put: Callable[[Scalars], None], log_metrics: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a logger's ``log_metrics`` and hands on what it has collected, also when it raises."""
        with self.scalars() as collected:
            try:
                return log_metrics(*args, **kwargs)
            finally:
                for scalars in collected:
                    put(scalars)

    def add(self, tag: str, value: float, step: int | None, created: float) -> None:
        """A scalar."""
        assert self._found is not None
        last = self._found[-1] if self._found else None
        if last is None or last.step != step or tag in last.values:
            self._found.append(Scalars(step=step, values={tag: value}, created=created))
        else:
            last.values[tag] = value


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
