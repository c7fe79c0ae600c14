"""A method of one object, replaced for a while."""

from collections.abc import Callable
from typing import Any


class ReplacedMethod:
    """Stands for a method, as an attribute of the object that has it, until it is removed.

    A copy of the object has its own method again: Trainers are copied and sent to other processes.

    Args:
        owner: The object.
        name: Name of the method.
        call: What is called in its place.

    Attributes:
        original: The method that it stands for.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self._owner = owner
        self._name = name
        self._call = call
        self._is_removed = False
        self._before = {name: vars(owner)[name]} if name in vars(owner) else {}
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what stands in for the method; once that is removed, for whoever has kept it, the method."""
        return (self.original if self._is_removed else self._call)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)

    def remove(self) -> None:
        """The object is as it was."""
        self._is_removed = True
        vars(self._owner).pop(self._name, None)
        vars(self._owner).update(self._before)
