"""Lightning's counters of epochs, batches and steps: copied at each boundary, and saved as they were there."""

import copy
from collections.abc import Iterator
from typing import Any

from lightning_ncclsafe.checkpoints.boundary import Boundary

_BATCHES, _EVALUATED = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"


class LoopCounters:
    """The counters of the training loop and of those within it.

    Args:
        fit_loop: Lightning's training loop.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop
        self._progress = [*_progress(fit_loop)]
        self._parts = [vars(part) for _, progress in self._progress for part in _parts(progress)]

    def copy(self) -> list[dict[str, Any]]:
        """All of them as they are now, in an order of their own."""
        return [part.copy() for part in self._parts]

    def loop_state(self, boundary: Boundary) -> dict[str, Any]:
        """What a checkpoint has of the training loop, as of the boundary.

        Resumed from it, Lightning goes on with the next batch, after a validation if that was to come first.
        """
        state: dict[str, Any] = self._fit_loop.state_dict()
        counts = iter(boundary.counts)
        for name, progress in self._progress:
            # A copy has parts of its own, in the same order.
            mirrored = copy.deepcopy(progress)
            for part in _parts(mirrored):
                vars(part).update({key: value for key, value in next(counts).items() if not hasattr(value, "__dict__")})
            if name in (_BATCHES, _EVALUATED):
                _complete(mirrored.total, mirrored.current)
            if name == _EVALUATED and boundary.validates:
                _begin_again(mirrored)
            state[name] = mirrored.state_dict()
        # Lightning adds one where it comes to the end of a batch again, and not where it begins with the next.
        stepped = boundary.batches_that_stepped + (not boundary.is_over and not boundary.validates) - boundary.checks
        state["epoch_loop.state_dict"] = {**state["epoch_loop.state_dict"], "_batches_that_stepped": stepped}
        if boundary.loaders:
            state["state_dict"] = {**state["state_dict"], "combined_loader": boundary.loaders}
        return state


def _progress(loop: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The counters of a loop and of those within it, by their names in a checkpoint."""
    for name, value in vars(loop).items():
        if type(value).__module__.endswith(".loops.progress"):
            yield f"{prefix}{name}", value
        elif any(kind.__module__.endswith(".loops.loop") for kind in type(value).__mro__):
            yield from _progress(value, f"{prefix}{name}.")


def _parts(progress: Any) -> Iterator[Any]:
    """A counter, and those that it is made of."""
    yield progress
    for value in vars(progress).values():
        if hasattr(value, "__dict__"):
            yield from _parts(value)


def _complete(*counts: Any) -> None:
    for count in counts:
        # Of the training's batch all is done but its hooks, and an evaluation that has been is not gone back to.
        count.ready = count.started = count.completed = count.processed


def _begin_again(evaluated: Any) -> None:
    """As Lightning leaves a validation in the middle of its first batch: then it goes back to it."""
    evaluated.current.reset()
    evaluated.is_last_batch = False
    for count in (evaluated.total, evaluated.current):
        count.ready = count.started = count.completed + 1
