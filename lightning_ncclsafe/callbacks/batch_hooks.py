"""Removes hooks that do nothing from callbacks: called for every batch, they cost time.

Lightning calls every callback's hooks within its profiler, and skips a hook that is not callable. For steps of 3 ms,
the empty hooks of five callbacks take 1 % of the time, and a line each in the user's profile.
"""

from typing import Any, TypeVar

T = TypeVar("T")

_NAMES = (
    *(f"on_{stage}_batch_{when}" for stage in ("train", "validation", "test", "predict") for when in ("start", "end")),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)


def without_batch_hooks(kind: type[T]) -> type[T]:
    """Removes the batch hooks that a callback's class does not define itself; a decorator."""
    for name in _NAMES:
        if name not in vars(kind):
            setattr(kind, name, _LeftOut(name))
    return kind


class _LeftOut:
    """In place of a hook: None, unless a user's derived class has the hook from another base."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Read for each batch.
        self._is_none: set[type] = set()

    def __get__(self, callback: object, kind: type) -> Any:
        if kind in self._is_none:
            return None
        *others, own = [vars(base)[self._name] for base in kind.__mro__ if self._name in vars(base)]
        if others == [self]:
            # The remaining one is that of Lightning's base class, which does nothing.
            self._is_none.add(kind)
            return None
        after = [*others, own][others.index(self) + 1]
        return after.__get__(callback, kind)
