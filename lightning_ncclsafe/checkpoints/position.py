"""Where one rank is in its data and its random numbers, as plain data, and how it gets there again.

A sampler is asked again for the indices that have been used, and nothing is loaded for them: its order comes from the
random states with which its epoch began, which are kept. Whether it is the same order is seen by a checksum.
"""

import random
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from lightning_ncclsafe.checkpoints.left_behind import LeftBehind
from lightning_ncclsafe.code.patching import ReplacedClass, ReplacedMethod, is_plain_python
from lightning_ncclsafe.probes.data.random_state import put_back, saved_states
from lightning_ncclsafe.report.terminal import say_on_stderr

# Of samplers around others: torch's, Lightning's, and what others call it.
_WITHIN = ("sampler", "_sampler", "batch_sampler", "_batch_sampler", "base_sampler", "dataset")
_DEEPEST = 6
_END = object()
_WARNED = "You're resuming from a checkpoint that ended before the epoch"
_UNUSABLE = (ValueError, TypeError, KeyError, RuntimeError, IndexError, AttributeError)

_of_trainer: "WeakKeyDictionary[Any, DataPosition]" = WeakKeyDictionary()


def capture(trainer: Any) -> dict[str, Any]:
    """What this rank needs to go on with the very next batch, as plain data. Called between two batches of training."""
    known = _of_trainer.get(trainer)
    if known is not None:
        return known.capture()
    return {"random": saved_states(), "batches": _batches_of(trainer), "loaders": None}


def _batches_of(trainer: Any) -> int:
    """How many batches of this epoch have been trained on."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


class DataPosition:
    """The position of one rank in the training of one call of ``fit``.

    Args:
        trainer: The ``Trainer``.
        say: Prints a line to the user.
        left_behind: Where others find what was captured last; None for nowhere.
    """

    def __init__(
        self, trainer: Any, say: Callable[[str], None] = say_on_stderr, left_behind: LeftBehind | None = None
    ) -> None:
        self._trainer = trainer
        self._left_behind = left_behind
        self._say = say
        self._methods: list[ReplacedMethod] = []
        self._loaders: list[_Indices | _Stateful | None] = []
        self._resumed: Mapping[str, Any] | None = None
        self._knows_all = False
        self._goes_on = False
        self._random: Mapping[str, Any] | None = None
        self._ahead: Mapping[str, Any] | None = None
        self._why_not_ahead = ""

    def attach(self) -> None:
        """Watches the samplers of the training's loaders, each as it is about to be read."""
        fit = self._trainer.fit_loop
        loaders = ReplacedMethod(fit, "_load_combined_loader_states", lambda: self._loaders_are_there(loaders))
        begins = ReplacedMethod(fit.epoch_loop, "on_run_start", lambda *args: self._epoch_begins(begins, *args))
        reset = ReplacedMethod(fit.epoch_loop, "reset", lambda: self._reset(reset))
        self._methods = [loaders, begins, reset]
        if self._left_behind is not None:
            precision = self._trainer.precision_plugin
            backward = ReplacedMethod(precision, "pre_backward", lambda *args: self._backward_begins(backward, *args))
            self._methods.append(backward)
        _of_trainer[self._trainer] = self

    def detach(self) -> None:
        """Lightning and the samplers are as they were."""
        while self._methods:
            self._methods.pop().remove()
        self._release()
        _of_trainer.pop(self._trainer, None)

    def capture(self) -> dict[str, Any]:
        """See :func:`capture`."""
        position = self._after(_batches_of(self._trainer))
        if self._left_behind is not None:
            then = position | {"step": int(self._trainer.global_step)}
            # Nothing has drawn since the backward pass: that is there.
            if self._ahead is None or not _is_same(self._ahead, then):
                self._left_behind.write(then)
            self._ahead = None
        return position

    def _backward_begins(self, backward: ReplacedMethod, *args: Any) -> Any:
        """Once its gradients are there the others can make the step, whatever becomes of this rank meanwhile.

        What comes until the end of the batch hardly draws random numbers: where this rank will be then is left behind.
        """
        result = backward.original(*args)
        trainer = self._trainer
        if not self._why_not_ahead and trainer.lightning_module.automatic_optimization:
            try:
                if not trainer.fit_loop.epoch_loop._should_accumulate():
                    self._leave_ahead()
            except Exception as error:  # training goes on
                self._why_not_ahead = repr(error)
        return result

    def _leave_ahead(self) -> None:
        assert self._left_behind is not None
        then = self._after(_batches_of(self._trainer) + 1) | {"step": int(self._trainer.global_step) + 1}
        # Not over that of the step before, which counts until this one is made; some optimizers go backward repeatedly.
        self._left_behind.write(then, over_last=self._ahead is not None)
        self._ahead = then

    def _after(self, batches: int) -> dict[str, Any]:
        """As random numbers are now, after so many batches of the epoch."""
        loaders = [loader.record(batches) if loader is not None else None for loader in self._loaders]
        return {
            # Those of a checkpoint come into force in a moment.
            "random": dict(self._random) if self._random is not None else saved_states(),
            "batches": batches,
            "loaders": loaders if loaders and all(loader is not None for loader in loaders) else None,
        }

    def resume(self, saved: Mapping[str, Any] | None, *, knows_all: bool) -> None:
        """Goes on from what :meth:`capture` has given, once Lightning has restored its loops and has its loaders.

        Args:
            saved: Of this rank; None where the checkpoint does not have it.
            knows_all: Whether the checkpoint has the position of every rank in its data, so that all ranks come to
                the same decision.
        """
        self._resumed = saved if saved is not None else {}
        self._knows_all = knows_all
        self._random = self._resumed.get("random")

    def _release(self) -> None:
        while self._loaders:
            loader = self._loaders.pop()
            if loader is not None:
                loader.release()

    def _loaders_are_there(self, replaced: ReplacedMethod) -> Any:
        """Lightning has the training's loaders, and is about to begin to read them."""
        self._release()
        fit = self._trainer.fit_loop
        found = fit._combined_loader.flattened if fit._combined_loader is not None else []
        self._loaders = [_watched(getattr(loader, "stands_for", loader)) for loader in found]
        resumed, self._resumed = self._resumed, None
        # An epoch that is over is not gone back to.
        if resumed is None or not fit.restarting:
            return replaced.original()
        records = resumed.get("loaders") or [None] * len(self._loaders)
        batches = _batches_of(self._trainer)
        if not self._can_go_on(resumed, records, batches):
            self._begin_again(batches)
            return replaced.original()
        # Lightning gives all ranks what one of them has saved of loaders with a state; each has its own after that.
        result = replaced.original()
        epoch = int(fit.epoch_progress.current.processed)
        for loader, record in zip(self._loaders, records, strict=True):
            if loader is not None:
                loader.go_on(record, batches, epoch, self._say_first)
        self._goes_on = True
        return result

    def _reset(self, replaced: ReplacedMethod) -> Any:
        """Lightning warns here of loaders that have no state of their own; it does not know of ours."""
        goes_on, self._goes_on = self._goes_on, False
        with warnings.catch_warnings() if goes_on else nullcontext():
            if goes_on:
                warnings.filterwarnings("ignore", message=_WARNED)
            return replaced.original()

    def _can_go_on(self, resumed: Mapping[str, Any], records: Sequence[Any], batches: int) -> bool:
        """Whether all ranks know where their data stood: the same answer on every rank."""
        if resumed.get("batches", batches) != batches or len(records) != len(self._loaders):
            return False
        return all(
            loader is not None and loader.can_go_on(record if self._knows_all else None)
            for loader, record in zip(self._loaders, records, strict=True)
        )

    def _begin_again(self, batches: int) -> None:
        """Weights and counters are those of the checkpoint; only the data begins anew."""
        fit = self._trainer.fit_loop
        progress = fit.epoch_loop.batch_progress
        if not batches or progress.is_last_batch:
            return
        fit._combined_loader_states_to_load = []
        progress.current.reset()
        progress.total.started = progress.total.processed = progress.total.completed = progress.total.ready
        progress.is_last_batch = False
        self._say_first(
            f"training restarts epoch {fit.epoch_progress.current.processed} from its first batch, after {batches} "
            "batches: the data position of every rank is not known (an iterable dataset, a sampler that cannot be "
            "replayed, a rank that could not report its position, or a different number of ranks)"
        )

    def _say_first(self, text: str) -> None:
        if self._trainer.is_global_zero:
            self._say(text)

    def _epoch_begins(self, replaced: ReplacedMethod, *args: Any) -> Any:
        """Lightning is about to train on the next batch, or to make up for a validation."""
        result = replaced.original(*args)
        for loader in self._loaders:
            if loader is not None:
                loader.catch_up()
        states, self._random = self._random, None
        if states is not None:
            try:
                put_back(states)
            except _UNUSABLE as error:
                self._say(f"rank {self._trainer.global_rank}: random states of the checkpoint are unusable: {error}")
        return result


def _watched(loader: Any) -> "_Indices | _Stateful | None":
    """What keeps the position in a loader; None where there is no way to."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _Stateful(loader)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return _Indices(loader, sampler) if is_plain_python(type(sampler)) else None


class _Stateful:
    """The position in a loader that knows it itself."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def record(self, batches: int) -> dict[str, Any] | None:
        return {"state": self._loader.state_dict()}

    def can_go_on(self, record: Mapping[str, Any] | None) -> bool:
        # Without one, a rank that is alone has what Lightning's checkpoint has; of several, it is that of one.
        return "state" in record if record is not None else _torch_world_size() == 1

    def go_on(self, record: Mapping[str, Any] | None, batches: int, epoch: int, say: Callable[[str], None]) -> None:
        if record is not None:
            self._loader.load_state_dict(record["state"])

    def catch_up(self) -> None:
        pass

    def release(self) -> None:
        pass


class _Indices:
    """The position in a loader of a map-style dataset: how its epoch began, and what its sampler has given since.

    Args:
        loader: The loader.
        sampler: What gives it indices, a batch or a sample at a time.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._loader = loader
        self._sampler = sampler
        self._generators = [*_generators(loader, sampler)]
        self._is_determined = _is_determined(sampler)
        self._begin: Mapping[str, Any] | None = None
        self._first: Mapping[str, Any] | None = None
        self._then: list[Any] = []
        self._digests = array("I")
        self._is_untouched = False
        self._resumed: tuple[Mapping[str, Any], int] | None = None
        self._own: Iterator[Any] | None = None
        self._say: Callable[[str], None] = say_on_stderr
        parent = type(sampler)
        self._replaced = ReplacedClass(sampler, {"__iter__": lambda _: self._iterate(lambda: parent.__iter__(sampler))})

    def record(self, batches: int) -> dict[str, Any] | None:
        """How to come to this batch again; None where this is not its first pass through the data."""
        if self._begin is None or len(self._digests) < batches:
            return None
        return {
            "begin": self._begin,
            "first": self._first,
            "generators": self._then,
            "digest": self._digests[batches - 1] if batches else 0,
        }

    def can_go_on(self, record: Mapping[str, Any] | None) -> bool:
        """Whether the same order can be had: by what was kept, or because it is a matter of seed and epoch."""
        return self._is_determined if record is None else "begin" in record

    def go_on(self, record: Mapping[str, Any] | None, batches: int, epoch: int, say: Callable[[str], None]) -> None:
        """The next epoch that is begun goes on behind these batches."""
        # With workers Lightning would ask for indices before it sets the epoch.
        for part in (self._loader.sampler, *_parts(self._sampler)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        self._resumed, self._say = (record or {}, batches), say

    def catch_up(self) -> None:
        """Asks now for what has been used: after the last batch of an epoch nobody asks for another one in it."""
        resumed, own = self._resumed, self._own
        if resumed is not None and own is not None:
            self._resumed = None
            self._skip(own, *resumed)

    def release(self) -> None:
        """The sampler is as it was."""
        self._replaced.restore()

    def _iterate(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        # Torch begins a sampler twice where worker processes read: the first one is never asked.
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
        except _UNUSABLE as error:
            self._say(f"the record of how the checkpoint's epoch began is unusable: {error}")
        self._begin = saved_states()
        self._then = [_get(generator) for generator in self._generators]

    def _indices(self, own: Iterator[Any]) -> Iterator[Any]:
        self._is_untouched = False
        self.catch_up()
        if self._first is None:
            self._first = saved_states()
        # Some samplers are their own iterators: to iterate them once more would begin them again.
        while (indices := next(own, _END)) is not _END:
            self._note(indices)
            yield indices

    def _skip(self, own: Iterator[Any], record: Mapping[str, Any], batches: int) -> None:
        """Asks for the indices that have been used; the training's random numbers go on as if nobody had."""
        now = saved_states()
        with suppress(*_UNUSABLE):
            if record.get("first") is not None:
                put_back(record["first"])
        self._first = record.get("first") or saved_states()
        for _ in range(batches):
            try:
                self._note(next(own))
            except StopIteration:
                break
        put_back(now)
        told = record.get("digest")
        if len(self._digests) < batches:
            self._say(f"the data has only {len(self._digests)} batches now, but {batches} were already trained on")
        elif batches and told is not None and told != self._digests[-1]:
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


def _is_same(one: Any, other: Any) -> bool:
    """Of two positions, of which the most is the very same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) or (isinstance(one, tuple) and any(isinstance(each, torch.Tensor) for each in one)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _torch_world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _parts(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it is around."""
    seen: list[Any] = []
    left = [sampler]
    while left and len(seen) < _DEEPEST:
        part = left.pop()
        if any(part is one for one in seen):
            continue
        seen.append(part)
        yield part
        named = vars(part) if hasattr(part, "__dict__") else {}
        # A sampler that shares out another one among ranks has that as its dataset.
        left.extend(named[name] for name in _WITHIN if name in named and (name != "dataset" or _samples(named[name])))


def _samples(dataset: Any) -> bool:
    return hasattr(dataset, "__dict__") and "_sampler" in vars(dataset)


def _generators(loader: Any, sampler: Any) -> Iterator[Any]:
    """The user's own generators that decide the order: of the loader, its sampler, and what that is around."""
    seen: set[int] = set()
    for part in (loader, *_parts(sampler)):
        for value in vars(part).values() if hasattr(part, "__dict__") else ():
            if isinstance(value, (torch.Generator, random.Random)) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _get(generator: Any) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))


def _is_determined(sampler: Any) -> bool:
    """Whether the order is a matter of what is set alone, a seed and the epoch, or nothing."""
    return all(type(part) in (SequentialSampler, DistributedSampler, BatchSampler) for part in _parts(sampler))
