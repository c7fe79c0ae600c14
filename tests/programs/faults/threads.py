"""What the later rounds of scenarios after public threads share: how the truth is said, and when it comes about."""

from collections.abc import Callable
from typing import Any

from training import IN_THE_MIDDLE, Here
from truths import Moment, Run, fault, healthy


def thread(
    address: str,
    *causes: str,
    ranks: tuple[int, ...] | None = (1,),
    world_size: int = 3,
    moment: Moment = Moment.MIDDLE,
    **more: Any,
) -> Callable[[Run], Run]:
    """A training that goes wrong, after the thread at this address; see `Scenario`."""
    return fault(*causes, ranks=ranks, at={moment: (world_size,)}, has_phase=False, source=address, **more)


def quiet(address: str, *, world_size: int = 2, moment: Moment = Moment.MIDDLE) -> Callable[[Run], Run]:
    """One that only looks odd."""
    return healthy({moment: (world_size,)}, source=address)


def goes_wrong(here: Here, batch_idx: int) -> bool:
    """Whether it does in this step, on this rank; from then on time counts."""
    is_now = here.is_hit and batch_idx == IN_THE_MIDDLE
    if is_now:
        here.begins()
    return is_now


def on_split_model(here: Here) -> Here:
    """The same on a model that FSDP2 has split, whatever strategy was asked for."""
    return here.with_(strategy_name="SafeModelParallel")
