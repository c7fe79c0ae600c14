"""One set of worker processes of a loader, or none: the loader as it is, but for that and what it draws from."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from lightning_ncclsafe import _torch
from lightning_ncclsafe.loaders.tuning.deadlines import Deadlines
from lightning_ncclsafe.loaders.tuning.gates import Gate, Indices, Setting


class WorkerPool:
    """Reads one epoch of a loader with one setting; several epochs where its workers persist.

    Args:
        loader: The user's ``DataLoader``; it is not changed.
        setting: How many workers, and how far ahead.
        gate: What it draws from.
        seed: What its workers' random numbers follow from; None to draw it where torch does.
        is_extra: Whether it has more workers than the user has asked for.
        deadlines: How long such workers may be silent.

    Attributes:
        iterator: Torch's iterator.
        pids: The process ids of its workers.
        seed: The number that was drawn.

    Raises:
        Exception: Whatever torch, pickle and the system raise where workers cannot be started, and what the user's
            sampler raises.
    """

    def __init__(
        self, loader: Any, setting: Setting, gate: Gate, *, seed: int | None, is_extra: bool, deadlines: Deadlines
    ) -> None:
        self.setting = setting
        self.gate = gate
        self.is_extra = is_extra
        self._deadlines = deadlines
        self._is_first = True
        self._is_silent = False
        self._is_in_order = bool(getattr(loader, "in_order", True))
        generator = loader.generator if seed is None else _torch.generator_from(seed)
        self._loader = _copy_of(loader, setting, gate, generator)
        self.iterator: Iterator[Any] = _torch.begin_loading(self._loader)
        self.pids = _torch.worker_pids(self.iterator)
        self.seed = _torch.base_seed_of(self.iterator)

    def renew(self, indices: Indices) -> None:
        """Begins another epoch with the same workers."""
        self.gate.renew(indices)
        self._is_first = False
        with self._in_time():
            self.iterator._reset(self._loader)  # type: ignore[attr-defined]

    def next_batch(self) -> Any:
        """The batch that is due.

        Raises:
            WorkersSilent: Workers that the user has not asked for have not answered in time.
            Exception: What the iterator raises, ``StopIteration`` at its end.
        """
        began_s = time.monotonic()
        try:
            with self._in_time():
                batch = next(self.iterator)
        except _torch.WorkersSilent:
            self._is_silent = True
            raise
        self._is_first = False
        self._deadlines.note(time.monotonic() - began_s)
        return batch

    def _in_time(self) -> AbstractContextManager[None]:
        within_s = self._deadlines.of_batch(is_first=self._is_first) if self.is_extra else None
        return _torch.answered_within(self.iterator, within_s)

    def handed(self) -> None:
        """It has handed out a batch."""
        if self._is_in_order or not self.pids:
            self.gate.handed()
        else:
            self.gate.handed(_torch.pending_batches(self.iterator))
        self._fill()

    def limit(self, most: int | None) -> None:
        """Has no more batches ahead than so many from now on; None for as many as its setting says."""
        if self.pids:
            self.gate.most = most
            self._fill()

    def _fill(self) -> None:
        while self.gate.waits:
            _torch.ask_for_batch(self.iterator)

    def ask_to_end(self) -> None:
        """Has its workers end, and does not wait for them: :meth:`end` does. What they had to make was taken back."""
        if not self._is_silent:
            _torch.ask_to_end_loading(self.iterator)

    def end(self) -> None:
        """Ends its workers and waits for them; what it has not handed out is due again."""
        self.gate.take_back()
        # Not left to chance: workers are gone before the first batch of those that follow.
        _torch.end_loading(self.iterator, at_once=self._is_silent)
        self.pids = ()


def _copy_of(loader: Any, setting: Setting, gate: Gate, generator: Any) -> Any:
    """A loader that shares everything with the user's but this; made without anything of the user's being called."""
    copy = object.__new__(type(loader))
    sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(copy).update(vars(loader))
    vars(copy).update(
        {
            sampler: gate,
            "num_workers": setting.workers,
            "prefetch_factor": setting.prefetch or None,
            "persistent_workers": loader.persistent_workers and setting.workers > 0,
            "timeout": loader.timeout if setting.workers else 0,
            "generator": generator,
            "_iterator": None,
        }
    )
    return copy
