"""The position of one rank in the data of one loader, as plain data, and how to restore it.

The sampler yields the used indices again, and no data is loaded for them. Its order follows from the random states at
the beginning of its epoch, which are saved; a checksum shows whether the order is the same.
"""

import random
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from lightning_ncclsafe.code.patching import ReplacedClass, is_plain_python
from lightning_ncclsafe.probes.data.random_state import put_back, saved_states

UNUSABLE = (ValueError, TypeError, KeyError, RuntimeError, IndexError, AttributeError)
"""What unusable states of a checkpoint raise."""

# Attributes in which samplers of torch, Lightning and others hold another sampler.
_WITHIN = ("sampler", "_sampler", "batch_sampler", "_batch_sampler", "base_sampler", "dataset")
_DEEPEST = 6
_END = object()


def loader_position(loader: Any, say: Callable[[str], None]) -> "LoaderPosition | None":
    """The position of a loader; None if it cannot be kept.

    Args:
        say: Prints a line if the loader cannot continue where it was.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _OwnState(loader)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return _SamplerPosition(loader, sampler, say) if is_plain_python(type(sampler)) else None


class _OwnState:
    """The position in a loader that keeps it itself."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def record(self, batches: int) -> dict[str, Any] | None:
        return {"state": self._loader.state_dict()}

    def can_resume(self, record: Mapping[str, Any] | None) -> bool:
        # Without a record there is the one state in Lightning's checkpoint, which is right for a single rank only.
        if record is not None:
            return "state" in record
        return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)

    def resume(self, record: Mapping[str, Any] | None, batches: int, epoch: int) -> None:
        if record is not None:
            self._loader.load_state_dict(record["state"])

    def catch_up(self) -> None:
        pass

    def release(self) -> None:
        pass


class _SamplerPosition:
    """The position in a loader of a map-style dataset: how its epoch began, and what its sampler has yielded since.

    Args:
        sampler: Yields its indices, a batch or a sample at a time.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any, say: Callable[[str], None]) -> None:
        self._loader = loader
        self._sampler = sampler
        self._say = say
        self._generators = [*_generators(loader, sampler)]
        # Whether the order depends only on settings, such as a seed and the epoch.
        known = (SequentialSampler, DistributedSampler, BatchSampler)
        self._is_determined = all(type(part) in known for part in _parts(sampler))
        self._begin: Mapping[str, Any] | None = None
        self._first: Mapping[str, Any] | None = None
        self._then: list[Any] = []
        self._digests = array("I")
        self._is_untouched = False
        self._resumed: tuple[Mapping[str, Any], int] | None = None
        self._own: Iterator[Any] | None = None
        parent = type(sampler)
        self._replaced = ReplacedClass(sampler, {"__iter__": lambda _: self._iterate(lambda: parent.__iter__(sampler))})

    def record(self, batches: int) -> dict[str, Any] | None:
        """How to get to this batch again; None if this is not the first pass through the data."""
        if self._begin is None or len(self._digests) < batches:
            return None
        return {
            "begin": self._begin,
            "first": self._first,
            "generators": self._then,
            "digest": self._digests[batches - 1] if batches else 0,
        }

    def can_resume(self, record: Mapping[str, Any] | None) -> bool:
        """Whether the order can be repeated: from the record, or because it depends only on seed and epoch."""
        return self._is_determined if record is None else "begin" in record

    def resume(self, record: Mapping[str, Any] | None, batches: int, epoch: int) -> None:
        """Lets the next epoch continue after these batches."""
        # With workers, Lightning would ask for indices before it sets the epoch.
        for part in (self._loader.sampler, *_parts(self._sampler)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        self._resumed = record or {}, batches

    def catch_up(self) -> None:
        """Skips the used indices now: after the last batch of an epoch, nothing else would."""
        resumed, own = self._resumed, self._own
        if resumed is not None and own is not None:
            self._resumed = None
            self._skip(own, *resumed)

    def release(self) -> None:
        """Restores the sampler."""
        self._replaced.restore()

    def _iterate(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        # With worker processes, torch makes two iterators of a sampler, and never uses the first.
        if not (self._is_untouched and self._loader.num_workers):
            self._epoch_begins()
        self._is_untouched = True
        self._own = begin()
        return self._indices(self._own)

    def _epoch_begins(self) -> None:
        self._digests = array("I")
        self._first = None
        record = self._resumed[0] if self._resumed is not None else {}
        try:
            if record.get("begin") is not None:
                put_back(record["begin"])
                for generator, state in zip(self._generators, record["generators"], strict=True):
                    _set(generator, state)
        except UNUSABLE as error:
            self._say(f"the record of how the checkpoint's epoch began is unusable: {error}")
        self._begin = saved_states()
        self._then = [
            generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()
            for generator in self._generators
        ]

    def _indices(self, own: Iterator[Any]) -> Iterator[Any]:
        self._is_untouched = False
        self.catch_up()
        if self._first is None:
            self._first = saved_states()
        # Some samplers are their own iterators: another iter() would start them again.
        while (indices := next(own, _END)) is not _END:
            self._note(indices)
            yield indices

    def _skip(self, own: Iterator[Any], record: Mapping[str, Any], batches: int) -> None:
        """Takes the used indices from the sampler, without effect on the training's random numbers."""
        now = saved_states()
        with suppress(*UNUSABLE):
            if record.get("first") is not None:
                put_back(record["first"])
        self._first = record.get("first") or saved_states()
        for _ in range(batches):
            try:
                self._note(next(own))
            except StopIteration:
                break
        put_back(now)
        expected = record.get("digest")
        if len(self._digests) < batches:
            self._say(f"the data has only {len(self._digests)} batches now, but {batches} were already trained on")
        elif batches and expected is not None and expected != self._digests[-1]:
            self._say(
                f"the order of samples differs from the previous start: batch {batches} and later ones may repeat "
                "samples of this epoch (another dataset or seed, or a sampler with another source of randomness)"
            )

    def _note(self, indices: Any) -> None:
        before = self._digests[-1] if self._digests else 0
        try:
            content = array("q", indices if isinstance(indices, (list, tuple)) else [indices]).tobytes()
        except (TypeError, OverflowError):
            content = repr(indices).encode()
        self._digests.append(zlib.crc32(content, before))


LoaderPosition = _OwnState | _SamplerPosition
"""The position of one rank in the data of one loader."""


def _parts(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it wraps."""
    seen: list[Any] = []
    left = [sampler]
    while left and len(seen) < _DEEPEST:
        part = left.pop()
        if any(part is one for one in seen):
            continue
        seen.append(part)
        yield part
        named = vars(part) if hasattr(part, "__dict__") else {}
        # A sampler that splits another one among ranks has that as its dataset.
        for name in _WITHIN:
            if name in named and (name != "dataset" or "_sampler" in getattr(named[name], "__dict__", {})):
                left.append(named[name])


def _generators(loader: Any, sampler: Any) -> Iterator[Any]:
    """The user's own generators that decide the order: of the loader, its sampler, and the samplers in that."""
    seen: set[int] = set()
    for part in (loader, *_parts(sampler)):
        for value in vars(part).values() if hasattr(part, "__dict__") else ():
            if isinstance(value, (torch.Generator, random.Random)) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
