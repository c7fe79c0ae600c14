"""What the loaders of one rank may use together: what the most limited host has room for, the same on all ranks."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Literal

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange import Exchange, ExchangeError, wait_for
from lightning_ncclsafe.facts import Capacity, codec
from lightning_ncclsafe.facts.wording import size_words

Bound = Literal["memory", "shm", "files"]
# More workers per core gain nothing, even if they mostly wait for storage.
_FAR_MORE = 4
# tf.data's kRamBudgetShare (tensorflow/core/data/root_dataset.cc): its buffers may fill half of what is
# available. The other half is for what grows after the budget was made: activations, optimizer state, page cache. Of
# /dev/shm also half: NCCL and the loaders of other libraries keep their segments there. Of open files, too: the user's
# own data may be in many.
_MEMORY_SHARE = 0.5
BUDGET_S = 10.0
"""How long ranks have to share what their hosts have, once the process group exists."""
_FIRST_POLL_S, _POLL_S = 0.001, 0.02
_BUDGET = "tuning/budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one rank's loaders may use together. None means that no limit is known.

    Attributes:
        cores: This rank's share of the host's cores, before what the process itself uses.
        workers: Most worker processes beyond the user's, of loaders that are read at the same time:
            ``workers * local ranks <= cores``.
        memory_bytes: Memory for batches that are ready, and for more workers than the user's.
        shm_bytes: Shared memory for batches that are ready.
        open_files: Tensors of batches that are ready: each is an open file of its worker (torch's default,
            ``torch.multiprocessing.get_sharing_strategy()``), and of the rank's own process once it is received.
        cores_from: What limits ``cores``, for the user: ``"2 cores shared by 4 ranks"``, ``"quota of 1.5 cores
            shared by 2 ranks"``.
        memory_from: The same for ``memory_bytes``: ``"half of the 1.2 GB left under the control group's limit"``.
        all_ranks: Whether all ranks of the job have shared what they may use.
    """

    cores: float
    workers: int
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    open_files: int | None = None
    cores_from: str = ""
    memory_from: str = ""
    all_ranks: bool = True

    @property
    def most_asked(self) -> int:
        """Most workers that the user may set, of loaders that are read at the same time."""
        return max(1, int(_FAR_MORE * self.cores))

    def most_batches(self, batch_bytes: int, tensors: int, *, copies: int = 1) -> dict[Bound, int]:
        """How many batches may be ready or in the making, by what limits them.

        Args:
            batch_bytes: Size of a batch.
            tensors: Tensors of a batch.
            copies: How often memory holds a batch that is ready: 2 if it is pinned.
        """
        found: dict[Bound, int] = {}
        if self.memory_bytes is not None and batch_bytes:
            found["memory"] = self.memory_bytes // (batch_bytes * copies)
        if self.shm_bytes is not None and batch_bytes:
            found["shm"] = self.shm_bytes // batch_bytes
        if self.open_files is not None and tensors:
            found["files"] = self.open_files // tensors
        return found


def budget_of(own: Capacity, local: Sequence[Capacity]) -> Budget:
    """The budget of one rank.

    Ranks share evenly what several of them may use, so that the workers of all ranks of a host together never exceed
    its cores or a quota.

    Args:
        own: What this rank may use.
        local: What the ranks of its host may use, including itself; ranks of other hosts, by ``machine``, are ignored.
    """
    ranks = [rank for rank in local if rank.machine == own.machine]
    if own not in ranks:
        ranks.append(own)
    cores, cores_from = min(_core_shares(own, ranks))
    memory_bytes, memory_from = min(_memory_shares(own, ranks), default=(None, ""))
    shm_free = own.shm_free_bytes
    return Budget(
        cores=float(cores),
        workers=int(cores),
        memory_bytes=memory_bytes,
        shm_bytes=None if shm_free is None else int(_MEMORY_SHARE * max(0, shm_free) / len(ranks)),
        open_files=None if own.open_files_left is None else int(_MEMORY_SHARE * own.open_files_left),
        cores_from=cores_from,
        memory_from=memory_from,
    )


def _core_shares(own: Capacity, ranks: Sequence[Capacity]) -> list[tuple[Fraction, str]]:
    """The share of the cores of the affinity mask, and of each quota above it; exact, as it is rounded down later."""
    masks = [_cpus(rank) for rank in ranks]
    sharing = [sum(cpu in mask for mask in masks) for cpu in _cpus(own)]
    how = ", some of them shared with other ranks" if len(set(sharing)) > 1 else _shared_by(sharing[0])
    found = [(sum((Fraction(1, count) for count in sharing), Fraction()), f"{_cores(len(sharing))}{how}")]
    # A larger quota further up may leave less for each rank, as more ranks share it.
    for group, quota_cores in own.quotas.items():
        count = sum(group in rank.quotas for rank in ranks)
        quota = Fraction(max(0.0, quota_cores))
        found.append((quota / count, f"quota of {_cores(quota_cores)}{_shared_by(count)}"))
    return found


def _cpus(capacity: Capacity) -> frozenset[int]:
    """The cores that a process may run on; all if unknown."""
    return frozenset(capacity.cpus or range(os.cpu_count() or 1))


def _memory_shares(own: Capacity, ranks: Sequence[Capacity]) -> list[tuple[int, str]]:
    """What each limit leaves for this rank's loaders, with a description."""
    found = []
    for group, left_bytes in own.memory_left_bytes.items():
        count = sum(group in rank.memory_left_bytes for rank in ranks)
        found.append(_memory_share(left_bytes, count, "left under the control group's limit"))
    if own.memory_available_bytes is not None:
        found.append(_memory_share(own.memory_available_bytes, len(ranks), "available on the host"))
    if own.process_limit_bytes is not None:
        found.append(_memory_share(own.process_limit_bytes, 1, "that the process may still allocate"))
    return found


def _memory_share(left_bytes: int, ranks: int, where: str) -> tuple[int, str]:
    left_bytes = max(0, left_bytes)
    return int(_MEMORY_SHARE * left_bytes / ranks), f"half of the {size_words(left_bytes)} {where}{_shared_by(ranks)}"


def _shared_by(ranks: int) -> str:
    return f" shared by {ranks} ranks" if ranks > 1 else ""


def _cores(number: float) -> str:
    return "1 core" if number == 1 else f"{number:.4g} cores"


@marked(Mark.STORE)
def agree_on_budget(
    exchange: Exchange, own: Capacity, *, rank: int, world_size: int, over: threading.Event
) -> Budget | None:
    """Agrees on what the loaders of every rank may use together.

    Args:
        own: What this rank may use of its host.
        over: Ends the wait.

    Returns:
        The budget, the same on all ranks; None if rank 0 has not shared one in time.
    """
    exchange.set(f"tuning/capacity/{rank}", codec.encode(own))
    keys = [f"tuning/capacity/{one}" for one in range(world_size)] if rank == 0 else [_BUDGET]
    found: dict[str, bytes] = {}

    def all_are_there() -> bool:
        found.update(exchange.get_many([key for key in keys if key not in found]))
        return len(found) == len(keys)

    with suppress(ExchangeError):  # the store is lost
        wait_for(
            all_are_there,
            deadline_s=BUDGET_S if rank == 0 else 2 * BUDGET_S,
            # The training thread waits for the budget before its first loader.
            poll_s=_FIRST_POLL_S,
            longest_poll_s=_POLL_S,
            give_up=over.is_set,
            forgive=exchange,
        )
    if rank != 0:
        return codec.decode(Budget, found[_BUDGET]) if found else None
    budget = least_budget([codec.decode(Capacity, capacity) for capacity in found.values()] or [own])
    budget = replace(budget, all_ranks=len(found) == world_size)
    exchange.set(_BUDGET, codec.encode(budget))
    return budget


def least_budget(ranks: Sequence[Capacity]) -> Budget:
    """The least of the budgets of these ranks, limit by limit."""
    by_machine: dict[str, list[Capacity]] = {}
    for capacity in ranks:
        by_machine.setdefault(capacity.machine, []).append(capacity)
    budgets = [budget_of(own, by_machine[own.machine]) for own in ranks]
    cores = min(budgets, key=lambda budget: (budget.workers, budget.cores))
    memory = min(budgets, key=lambda budget: inf if budget.memory_bytes is None else budget.memory_bytes)
    return replace(
        cores,
        memory_bytes=memory.memory_bytes,
        memory_from=memory.memory_from,
        shm_bytes=min((one.shm_bytes for one in budgets if one.shm_bytes is not None), default=None),
        open_files=min((one.open_files for one in budgets if one.open_files is not None), default=None),
    )


def fewer_workers(name: str, asked: int, workers: int, budget: Budget) -> str:
    """The message if the user's workers are far more than the cores."""
    return (
        f"{name}: num_workers={workers} instead of {asked} on every rank: the cores allow no more ({budget.cores_from})"
    )


def fewer_ahead(name: str, asked: int, most: int, batch_bytes: int, bound: Bound, budget: Budget) -> str:
    """The message if there is no room for as many batches ahead as the user has set."""
    where = {
        "memory": f"memory ({budget.memory_from})",
        "shm": "/dev/shm (half of what is free)",
        "files": "open files (ulimit -n)",
    }[bound]
    batches = "1 batch" if most == 1 else f"{most} batches"
    return f"{name}: {batches} of {size_words(batch_bytes)} prefetched instead of {asked:,}: limited by {where}"
