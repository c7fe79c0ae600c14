"""Which callbacks are recommended together, and what takes the place of one of them."""

from collections.abc import Collection, Sequence
from typing import Any

from lightning_ncclsafe._lightning import package_of
from lightning_ncclsafe.callbacks.declared import DatasetAgreementHooks


def recommended(kinds: Sequence[type], callback: type, own: Sequence[Any], without: Collection[type]) -> list[Any]:
    """The callbacks that are recommended with a strategy of this package, new ones at each call.

    Args:
        kinds: The recommended classes, in their order.
        callback: Lightning's ``Callback``, of their package.
        own: Callbacks of the user's own; see ``safe_callbacks``.
        without: Recommended classes to leave out.

    Raises:
        TypeError: If one of ``own`` is no callback, or ``without`` no list.
        ValueError: If ``without`` has what is not recommended or what is given, or two of a recommended class are
            given.
    """
    _check_without(kinds, without)
    for each in own:
        if not isinstance(each, callback):
            raise TypeError(_not_a_callback(each, package_of(callback)))
    chosen = [_of_kind(kind, own, left_out=kind in without) for kind in kinds]
    others = [each for each in own if not isinstance(each, tuple(kinds))]
    return [*(each for each in chosen if each is not None), *others]


def _of_kind(kind: type, own: Sequence[Any], *, left_out: bool) -> Any:
    given = [callback for callback in own if isinstance(callback, kind)]
    if len(given) > 1:
        raise ValueError(f"safe_callbacks was given {len(given)} callbacks of class {kind.__name__}; pass only one.")
    if given and left_out:
        raise ValueError(f"safe_callbacks was given a {kind.__name__}, which without= leaves out; remove one of them.")
    if left_out:
        return None
    # A program is not refused for data on which stock trains, unless its author has asked for that.
    settings = {"on_mismatch": "raise_on_hang"} if issubclass(kind, DatasetAgreementHooks) else {}
    return given[0] if given else kind(**settings)


def _check_without(kinds: Sequence[type], without: Collection[type]) -> None:
    names = ", ".join(kind.__name__ for kind in kinds)
    if isinstance(without, (str, type)) or not isinstance(without, Collection):
        raise TypeError(f"without={without!r} must be a list with classes from {names}.")
    for kind in without:
        if kind not in kinds:
            raise ValueError(f"without={without!r} has {kind!r}, which is not recommended; only {names} are.")


def _not_a_callback(given: object, package: str) -> str:
    if isinstance(given, type):
        return f"safe_callbacks was given the class {given.__name__}; pass an instance: {given.__name__}()."
    if isinstance(given, (list, tuple)):
        return f"safe_callbacks was given a {type(given).__name__}; unpack it with *, as in safe_callbacks(*callbacks)."
    return f"safe_callbacks was given {given!r}, which is not a Callback of {package}."
