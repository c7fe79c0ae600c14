"""All ranks come to one budget: each says what it may use of its host, and rank 0 takes the least of all."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import Capacity, codec
from lightning_ncclsafe.loaders.tuning.budget import Budget, budget_of

BUDGET_S = 10.0
"""How long ranks have to say what their hosts have, once the process group is there."""

_POLL_S = 0.02
_BUDGET = "tuning/budget"


@marked(Mark.STORE)
def agree_on_budget(
    exchange: Exchange, own: Capacity, *, rank: int, world_size: int, over: threading.Event
) -> Budget | None:
    """What the loaders of every rank may use together.

    Args:
        exchange: What the ranks share.
        own: What this rank may use of its host.
        rank: This rank.
        world_size: Number of ranks.
        over: Ends the wait.

    Returns:
        The budget, the same on all ranks; None where rank 0 has not said one in time.
    """
    exchange.set(f"tuning/capacity/{rank}", codec.encode(own))
    give_up = time.monotonic() + (BUDGET_S if rank == 0 else 2 * BUDGET_S)
    keys = [f"tuning/capacity/{one}" for one in range(world_size)] if rank == 0 else [_BUDGET]
    found: dict[str, bytes] = {}
    while len(found) < len(keys) and not over.is_set() and time.monotonic() < give_up:
        with suppress(ExchangeError):  # one that has missed a deadline may answer the next time
            found |= exchange.get_many([key for key in keys if key not in found])
        if len(found) < len(keys):
            over.wait(_POLL_S)
    if rank != 0:
        return codec.decode(Budget, found[_BUDGET]) if found else None
    budget = least_budget([codec.decode(Capacity, capacity) for capacity in found.values()] or [own])
    budget = replace(budget, all_ranks=len(found) == world_size)
    exchange.set(_BUDGET, codec.encode(budget))
    return budget


def least_budget(ranks: Sequence[Capacity]) -> Budget:
    """What every rank's loaders may use, whatever host it is on.

    Args:
        ranks: What each rank may use of its host; at least one.
    """
    by_machine: dict[str, list[Capacity]] = {}
    for capacity in ranks:
        by_machine.setdefault(capacity.machine, []).append(capacity)
    budgets = [budget_of(own, by_machine[own.machine]) for own in ranks]
    cores = min(budgets, key=lambda budget: (budget.workers, budget.cores))
    memory = min(budgets, key=lambda budget: _or_infinite(budget.memory_bytes))
    shm = min(budgets, key=lambda budget: _or_infinite(budget.shm_bytes))
    files = min(budgets, key=lambda budget: _or_infinite(budget.open_files))
    return replace(
        cores,
        memory_bytes=memory.memory_bytes,
        memory_from=memory.memory_from,
        shm_bytes=shm.shm_bytes,
        open_files=files.open_files,
    )


def _or_infinite(most: int | None) -> float:
    return float("inf") if most is None else most
