"""The callbacks that are recommended together."""

from collections.abc import Callable, Collection, Sequence

from lightning_ncclsafe._lightning import CHOSEN, Callback
from lightning_ncclsafe.callbacks.collective_timer import CollectiveTimer
from lightning_ncclsafe.callbacks.dataset_agreement import DatasetAgreement
from lightning_ncclsafe.callbacks.host_preflight import HostPreflight
from lightning_ncclsafe.callbacks.loader_tuner import LoaderTuner
from lightning_ncclsafe.callbacks.logger_offload import LoggerOffload

_RECOMMENDED: dict[type[Callback], Callable[[], Callback]] = {
    HostPreflight: HostPreflight,
    # A program is not refused for data on which stock trains, unless its author has asked for that.
    DatasetAgreement: lambda: DatasetAgreement(on_mismatch="raise_on_hang"),
    LoaderTuner: LoaderTuner,
    LoggerOffload: LoggerOffload,
    CollectiveTimer: CollectiveTimer,
}


def safe_callbacks(*own: Callback, without: Collection[type[Callback]] = ()) -> list[Callback]:
    """The callbacks that are recommended with a strategy of this package, new ones at each call.

    Those are, in this order: :class:`~lightning_ncclsafe.HostPreflight`, :class:`~lightning_ncclsafe.DatasetAgreement`,
    :class:`~lightning_ncclsafe.LoaderTuner`, :class:`~lightning_ncclsafe.LoggerOffload` and
    :class:`~lightning_ncclsafe.CollectiveTimer`, each with its defaults, but for ``on_mismatch="raise_on_hang"``: as
    with the strategy alone, data that differs in content is a warning, and only what would hang is refused. Give
    ``DatasetAgreement()`` yourself to have the former refused, too.

    Args:
        *own: Callbacks of your own. One of a recommended class, or of a class derived from it, takes that one's place;
            all others follow, in the order given.
        without: Recommended classes to leave out; none by default.

    Raises:
        TypeError: If one of ``own`` is no callback, or ``without`` no list.
        ValueError: If ``without`` has what is not recommended or what is given, or two of a recommended class are
            given.

    Example::

        callbacks = safe_callbacks(CollectiveTimer(trace=False), ModelCheckpoint(), without=[LoaderTuner])
        trainer = L.Trainer(strategy=SafeDDP(), callbacks=callbacks)
    """
    _check_without(without)
    for callback in own:
        if not isinstance(callback, Callback):
            raise TypeError(_not_a_callback(callback))
    recommended = [_of_kind(kind, own, left_out=kind in without) for kind in _RECOMMENDED]
    others = [callback for callback in own if not isinstance(callback, tuple(_RECOMMENDED))]
    return [*(callback for callback in recommended if callback is not None), *others]


def _of_kind(kind: type[Callback], own: Sequence[Callback], *, left_out: bool) -> Callback | None:
    given = [callback for callback in own if isinstance(callback, kind)]
    if len(given) > 1:
        raise ValueError(f"safe_callbacks was given {len(given)} callbacks of class {kind.__name__}; give one of them.")
    if given and left_out:
        raise ValueError(f"safe_callbacks was given a {kind.__name__}, and told to leave it out; do one of the two.")
    if left_out:
        return None
    return given[0] if given else _RECOMMENDED[kind]()


def _check_without(without: Collection[type[Callback]]) -> None:
    names = ", ".join(kind.__name__ for kind in _RECOMMENDED)
    if isinstance(without, (str, type)) or not isinstance(without, Collection):
        raise TypeError(f"without={without!r} must be a list of classes out of {names}.")
    for kind in without:
        if kind not in _RECOMMENDED:
            raise ValueError(f"without={without!r} has {kind!r}, which is not recommended anyway: only {names} are.")


def _not_a_callback(given: object) -> str:
    if isinstance(given, type):
        return f"safe_callbacks was given the class {given.__name__}; give an instance of it: {given.__name__}()."
    if isinstance(given, (list, tuple)):
        return f"safe_callbacks was given a {type(given).__name__}; give its callbacks one by one, with a * before it."
    return f"safe_callbacks was given {given!r}, which is no Callback of {CHOSEN}."
