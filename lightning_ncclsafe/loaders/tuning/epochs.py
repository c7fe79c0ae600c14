"""The iterator over one epoch of a loader whose workers are changed meanwhile."""

from collections.abc import Iterator
from typing import Any, Protocol

from lightning_ncclsafe.loaders.tuning.gates import Indices
from lightning_ncclsafe.loaders.tuning.worker_pool import WorkerPool


class Pools(Protocol):
    """Where an epoch has its workers from."""

    def asked(self) -> None:
        """The next batch is asked for."""

    def given(self, pool: WorkerPool, batch: Any) -> None:
        """It has been handed out."""

    def pool(self, indices: Indices) -> WorkerPool:
        """Workers, as they are wanted now, for what an epoch has left."""

    def end(self, pool: WorkerPool) -> None:
        """Ends workers."""

    def release(self, pool: WorkerPool) -> None:
        """Has workers back at the end of an epoch: they may be there for the next, and are waited for otherwise."""

    def leave(self, pool: WorkerPool) -> None:
        """Has workers back from an epoch that is not read on for now: as `release`, without waiting for their end."""

    def falls_back(self, pool: WorkerPool, error: Exception) -> bool:
        """Whether it is not for the user to see that workers have failed: they were not his."""


class Epoch:
    """Hands out the batches of one epoch. Dropping it ends its workers, unless they persist.

    Args:
        pools: Where it has its workers from.
        indices: The epoch.
    """

    def __init__(self, pools: Pools, indices: Indices) -> None:
        self.pool: WorkerPool | None = None
        self._pools = pools
        self._indices = indices
        self._has_ended = False

    def start(self) -> None:
        """Starts workers; they are started with the first batch otherwise."""
        self.pool = self._pools.pool(self._indices)

    def park(self) -> None:
        """Has no workers until the next batch is asked for, which will be the one that is due."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.gate.take_back()
            self._pools.leave(pool)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._pools.asked()
        while not self._has_ended:
            if self.pool is None:
                self.start()
            pool = self.pool
            assert pool is not None
            try:
                batch = pool.next_batch()
            except StopIteration:
                self._pool_ended(pool)
            except Exception as error:
                if not self._goes_on_after(error, pool):
                    raise
            else:
                pool.handed()
                self._pools.given(pool, batch)
                return batch
        raise StopIteration

    def _pool_ended(self, pool: WorkerPool) -> None:
        self.pool = None
        if pool.gate.goes_on:
            self._pools.end(pool)
        else:
            self._has_ended = True
            self._pools.release(pool)

    def _goes_on_after(self, error: Exception, pool: WorkerPool) -> bool:
        if self._indices.has_failed or not self._pools.falls_back(pool, error):
            # Torch goes on with the next batch, should the user ask for one.
            pool.handed()
            return False
        self.pool = None
        self._pools.end(pool)
        return True

    def __len__(self) -> int:
        return len(self._indices)
