"""Replaces how a loader is iterated: the object stays the same and of the same type."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lightning_ncclsafe.code.patching import ReplacedClass, is_plain_python

Begin = Callable[[], Iterator[Any]]
Iterate = Callable[[Begin], Iterator[Any]]


class ReplacedIteration(ReplacedClass):
    """A loader whose iteration is replaced until :meth:`restore`.

    Users, Lightning and PyTorch ask ``isinstance(loader, DataLoader)``, so the object stays what it is: its class
    becomes a subclass of its own class.

    Args:
        loader: The loader; see :func:`replaceable`.
        iterate: Creates the iterator for Lightning's loops, from a function that begins the loader's own; all other
            code gets the loader's own.
        length: The length that the loader reports; None for its own.
        hides_length: Whether it reports no length.

    Attributes:
        loader: The loader.
    """

    def __init__(self, loader: Any, iterate: Iterate, *, length: int | None = None, hides_length: bool = False) -> None:
        self.loader = loader
        methods: dict[str, Any] = {"__iter__": _iter_method(type(loader), iterate)}
        if hides_length or length is not None:
            methods["__len__"] = _len_method(type(loader), None if hides_length else length)
        super().__init__(loader, methods)


def replaceable(loader: Any) -> Any:
    """The loader itself, or one around it if its class cannot be replaced: that of a list, a generator or a tensor."""
    if hasattr(type(loader), "__iter__") and is_plain_python(type(loader)):
        return loader
    return LoaderProxy(loader) if not hasattr(type(loader), "__len__") else _Sized(loader)


class LoaderProxy:
    """A proxy for an iterable of a built-in type.

    Attributes:
        wrapped_loader: The iterable.
    """

    def __init__(self, iterable: Any) -> None:
        self.wrapped_loader = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapped_loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "wrapped_loader" not in vars(self):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.wrapped_loader, name)


class _Sized(LoaderProxy):
    """A proxy for one that has a length."""

    def __len__(self) -> int:
        return len(self.wrapped_loader)


class _Batches:
    """The iterator that a loop reads. A Trainer may be copied meanwhile; the copy is empty."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._next = batches.__next__

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next()

    def __reduce__(self) -> Any:
        return iter, ((),)


def _iter_method(parent: type, iterate: Iterate) -> Callable[[Any], Iterator[Any]]:
    def __iter__(self: Any) -> Iterator[Any]:
        def begin() -> Iterator[Any]:
            return parent.__iter__(self)  # type: ignore[attr-defined, no-any-return]

        # A user who looks at a batch, perhaps on one rank only, gets the loader's own iterator.
        return _Batches(iterate(begin)) if _asked_by_a_loop(sys._getframe(1)) else begin()

    return __iter__


def _asked_by_a_loop(frame: FrameType | None) -> bool:
    """Whether one of Lightning's loops begins to read: its fetcher has its ``CombinedLoader`` create the iterators."""
    asked = _module(frame)
    while frame is not None and _module(frame).endswith(".utilities.combined_loader"):
        frame = frame.f_back
    return _module(frame) != asked and _module(frame).endswith(".loops.fetchers")


def _module(frame: FrameType | None) -> str:
    return str(frame.f_globals.get("__name__")) if frame is not None else ""


def _len_method(parent: type, length: int | None) -> Callable[[Any], int]:
    def __len__(self: Any) -> int:
        if length is None:
            raise TypeError(f"object of type {parent.__name__!r} has no len(): not all ranks know its length")
        return length

    return __len__
