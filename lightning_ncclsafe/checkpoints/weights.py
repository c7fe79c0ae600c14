"""The weights of a model, watched for changes instead of copied: a checkpoint reads them if nothing changed them.

Tensors count their changes themselves, and addresses show an assignment to ``.data``. Writes through ``.data`` are not
counted; callbacks that average weights make them around a validation and at the end of training, so the largest values
of all tensors can be compared as well.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_ncclsafe._torch import tensors

# Most bytes of copied buffers in total: statistics of normalization, which each forward pass changes.
_MOST_BUFFER_BYTES = 64 << 20


class WatchedParameter(NamedTuple):
    """One parameter, or one large buffer, on this rank.

    Attributes:
        name: Its name.
        parameter: The tensor that counts changes: the parameter as optimizers know it.
        values: Gives its present values on this rank.
    """

    name: str
    parameter: Any
    values: Callable[[], Any]


class WatchedWeights:
    """The saved state of a model: parameters and large buffers, which are watched, and small buffers, which are copied.

    Args:
        parts: This rank's parts of a sharded model; None for a replica.
    """

    def __init__(self, module: Any, parts: Sequence[WatchedParameter] | None = None) -> None:
        self._is_split = parts is not None
        self._watched = [*parts] if parts is not None else [_watched(*each) for each in module.named_parameters()]
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._copies: list[Any] = []
        room = _MOST_BUFFER_BYTES
        for full_name, owner, name in sorted(tensors.saved_buffers(module), key=lambda each: each[1][each[2]].nbytes):
            room -= owner[name].nbytes
            if room >= 0 and tensors.spread_size(owner[name]) is None:
                self._buffers.append((owner, name))
                self._copies.append(owner[name].detach().clone())
            else:
                self._watched.append(_watched(full_name, owner[name]))
        self._tensors = [each.parameter for each in self._watched]

    def versions(self) -> list[tuple[int, ...]]:
        """How often each tensor has changed and, in a replica, its address."""
        counts = tensors.change_counts(self._tensors)
        # FSDP itself replaces its shards by gathered parameters.
        return [*zip(counts)] if self._is_split else [*zip(counts, tensors.addresses(self._tensors), strict=True)]

    def largest(self) -> Any:
        """The largest absolute value of each tensor."""
        return tensors.largest(each.values() for each in self._watched)

    def changed(self, before: Sequence[tuple[int, ...]], now: Sequence[tuple[int, ...]]) -> list[str]:
        """Names of the tensors whose versions differ."""
        pairs = zip(self._watched, before, now, strict=True)
        return [watched.name for watched, one, other in pairs if one != other]

    def changed_values(self, before: Any) -> list[str]:
        """Names of the tensors with another largest value than before."""
        pairs = zip(self._watched, before, self.largest(), strict=True)
        return [watched.name for watched, one, other in pairs if not _is_same(one, other)]

    def copy_buffers(self) -> None:
        """Copies the small buffers as they are now."""
        if self._copies:
            tensors.copy_all(self._copies, [owner[name] for owner, name in self._buffers])

    def copied_buffers(self) -> dict[tuple[Any, ...], Any]:
        """The last copies of small buffers, by ``_torch.tensors.place_of``."""
        places = (tensors.place_of(owner[name]) for owner, name in self._buffers)
        return dict(zip(places, self._copies, strict=True))


def _watched(name: str, tensor: Any) -> WatchedParameter:
    return WatchedParameter(name, tensor, lambda: tensor)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two numbers are equal, or both NaN."""
    first, second = float(one), float(other)
    return first == second or (first != first and second != second)
