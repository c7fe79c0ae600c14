"""Replaces a method of one object, or its class, for a while."""

import copyreg
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

# Python's Py_TPFLAGS_HEAPTYPE: the class was made by a class statement.
_HEAP_TYPE = 1 << 9


class ReplacedMethod:
    """Replaces a method, as an attribute of its object, until it is removed.

    A copy of the object has its own method again: Trainers are copied and sent to other processes.

    Args:
        owner: The object.
        name: Name of the method.
        call: The function called instead.

    Attributes:
        original: The replaced method.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self._owner = owner
        self._name = name
        self._call = call
        self._is_removed = False
        self._then: Callable[..., Any] | None = None
        self._before = {name: vars(owner)[name]} if name in vars(owner) else {}
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the replacement; after removal, for callers that kept a reference, the method."""
        return ((self._then or self.original) if self._is_removed else self._call)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)

    def remove(self, then: Callable[..., Any] | None = None) -> None:
        """Restores the object; what somebody else has put in this one's place stays, and may go on calling it.

        Args:
            then: What callers that kept a reference call from now on; None for the method.
        """
        self._is_removed, self._then = True, then
        if vars(self._owner).get(self._name) is not self:
            return
        vars(self._owner).pop(self._name)
        before = self._before.get(self._name)
        if not isinstance(before, ReplacedMethod) or not before._is_removed:
            vars(self._owner).update(self._before)


class WrappedMethod(ReplacedMethod):
    """A replaced method whose replacement calls it.

    Args:
        owner: The object.
        name: Name of the method.
        call: The function called instead, with the method as its first argument.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        super().__init__(owner, name, partial(call, getattr(owner, name)))


class Replacements:
    """Methods that are replaced for a while, and restored together."""

    def __init__(self) -> None:
        self._replaced: list[ReplacedMethod] = []

    def replace(self, owner: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces a method; returns the original.

        Raises:
            AttributeError: If the owner does not have it, or refuses to have it replaced.
        """
        replaced = ReplacedMethod(owner, name, call)
        # Now, so that it is undone if the next one fails.
        self._replaced.append(replaced)
        return replaced.original

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replaces a method by a function that is given the method as its first argument."""
        self._replaced.append(WrappedMethod(owner, name, call))

    def undo(self) -> None:
        """Restores all methods, the last one first."""
        while self._replaced:
            self._replaced.pop().remove()


class ReplacedClass:
    """Replaces methods of an object that Python looks up in its class, such as ``__iter__``, until :meth:`restore`.

    The object stays the same, and an instance of its class, which becomes a subclass. A copy has the original class.

    Args:
        owner: The object; :func:`is_plain_python` has to be true for its class.
        methods: The methods by their names.
    """

    def __init__(self, owner: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._owner = owner
        self._type = type(owner)
        owner.__class__ = _subclass(self._type, {**methods, "__reduce_ex__": _reduce(self._type)})

    def restore(self) -> None:
        """Restores the object's class."""
        self._owner.__class__ = self._type


def is_plain_python(cls: type) -> bool:
    """Whether no part of a class is written in C: C code may remember the original class, as tensors do."""
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def _subclass(parent: type, methods: dict[str, Any]) -> type:
    names = {"__module__": parent.__module__, "__qualname__": parent.__qualname__, "__doc__": parent.__doc__}
    # Without slots it would have a __dict__, which the parent may not have, and could not replace its class.
    slots = {} if hasattr(parent, "__dictoffset__") and parent.__dictoffset__ else {"__slots__": ()}
    return type(parent.__name__, (parent,), {**names, **slots, **methods})


def _reduce(parent: type[object]) -> Callable[[Any, int], Any]:
    """Copies and pickles with the original class, which can be imported."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        made = parent.__reduce_ex__(self, protocol)
        if isinstance(made, str):
            return made
        function, arguments, *state = made
        # Pickle accepts copyreg's function only for objects of exactly that class.
        make = _new if function is copyreg.__newobj__ else function  # type: ignore[attr-defined]
        return make, tuple(parent if item is type(self) else item for item in arguments), *state

    return __reduce_ex__


def _new(cls: type, *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)
