"""The contents of a checkpoint, as Lightning itself makes them, but as of a boundary and without a collective.

Lightning's own code runs on another view of the Trainer: counters, schedulers and small states are those that were
copied at the boundary, and whatever would ask other ranks is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.checkpoints.boundary import Boundary, NotProvenError
from lightning_ncclsafe.checkpoints.ledger import StepLedger

# Optimizers with states divided among ranks, such as ZeroRedundancyOptimizer, have this method, which is a collective.
_CONSOLIDATE = "consolidate_state_dict"


class _View:
    """An object, seen with some of its attributes replaced."""

    def __init__(self, seen: Any, **replaced: Any) -> None:
        self._seen = seen
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # In a checkpoint, a datamodule's state has the name of its class.
        return type(self._seen)


def optimizer_state_of_replica(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of an optimizer, as of a boundary.

    Args:
        optimizer: The optimizer, or Lightning's around it.
        groups: The settings of its groups at the boundary.
    """
    state = getattr(optimizer, "_optimizer", optimizer).state_dict()
    # A scheduler may have set another learning rate since.
    merged = [{**group, **settings} for group, settings in zip(state["param_groups"], groups, strict=True)]
    return {**state, "param_groups": merged}


def contents(
    trainer: Any,
    ledger: StepLedger,
    boundary: Boundary,
    weights: Callable[[], Mapping[str, Any]],
    optimizer_state: Callable[[Any, Sequence[Mapping[str, Any]]], dict[str, Any]] = optimizer_state_of_replica,
) -> dict[str, Any]:
    """The checkpoint, or one rank's part of it if the model is sharded; must be written while nothing changes it.

    It contains the very tensors that are trained. The user's hooks for saving are called in the calling thread.

    Args:
        weights: The state of the model.
        optimizer_state: Makes the state of an optimizer from it and the settings of its groups at the boundary.

    Raises:
        NotProvenError: Only all ranks together have a part of it.
        Exception: Whatever the user's hooks raise.
    """
    for optimizer in trainer.optimizers:
        if hasattr(getattr(optimizer, "_optimizer", optimizer), _CONSOLIDATE):
            raise NotProvenError(f"the states of {type(optimizer).__name__} are divided among ranks")
    groups = {id(optimizer): settings for optimizer, settings in zip(trainer.optimizers, boundary.groups, strict=True)}
    schedulers = [
        _View(config, scheduler=_View(config.scheduler, state_dict=partial(dict, state)))
        for config, state in zip(trainer.lr_scheduler_configs, boundary.schedulers, strict=True)
    ]
    view = _View(
        trainer,
        current_epoch=boundary.epoch,
        global_step=boundary.step,
        callbacks=[_with_state(each, each.state_key, boundary) for each in trainer.callbacks],
        datamodule=trainer.datamodule and _with_state(trainer.datamodule, "", boundary),
        lr_scheduler_configs=schedulers,
        fit_loop=_View(trainer.fit_loop, state_dict=lambda: ledger.counters.loop_state(boundary)),
        profiler=_View(trainer.profiler, profile=lambda name: nullcontext()),
        strategy=_View(
            trainer.strategy,
            lightning_module_state_dict=lambda: _as_of_boundary(weights(), ledger),
            optimizer_state=lambda optimizer: optimizer_state(optimizer, groups[id(optimizer)]),
            barrier=lambda *args, **kwargs: None,
        ),
    )
    connector = type(trainer._checkpoint_connector)(view)
    made: dict[str, Any] = connector.dump_checkpoint(False)
    return made


def _with_state(owner: Any, key: str, boundary: Boundary) -> Any:
    if key not in boundary.states:
        return owner
    return _View(owner, state_dict=partial(dict, boundary.states[key]))


def _as_of_boundary(weights: Mapping[str, Any], ledger: StepLedger) -> dict[str, Any]:
    copies = ledger.weights.copied_buffers()
    return {
        name: copies.get(tensors.place_of(value), value) if hasattr(value, "data_ptr") else value
        for name, value in weights.items()
    }
