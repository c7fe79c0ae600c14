"""The exchanges of one call of the Trainer: over keys and files that no other call, start or job has used."""

import itertools
import os
import uuid
from collections import deque
from pathlib import Path
from typing import Any

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.exchange import (
    DirectoryExchange,
    Exchange,
    ExchangeError,
    FallbackExchange,
    InTimeExchange,
    MemoryExchange,
    TcpStoreExchange,
)
from lightning_ncclsafe.guard.local_ranks import Place
from lightning_ncclsafe.guard.restarts import agree_on_start

# What torchrun and SLURM call a start of a job, so that a restart on the same port is not taken for the one before.
_START_NAMES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")

# Each call that ranks guard together has keys of its own on the store; they call fit, validate, … in the same order.
_calls = itertools.count()
# What this rank has published in calls that have ended; a program may make any number of them.
_published: deque[set[str]] = deque()
# The name of this start, where the store may hold what an earlier one has left; the same for all calls.
_start: str | None = None


class CallExchanges:
    """Makes what the ranks of one call share.

    Args:
        report_dir: The folder of reports, in which exchanges of files have theirs.
    """

    def __init__(self, report_dir: Path) -> None:
        self._report_dir = report_dir
        self._own_keys: set[str] = set()

    def before_start(self, strategy: Any) -> Exchange:
        """What the ranks share before there is a process group."""
        return self._files(meeting_place(strategy)) if strategy.world_size > 1 else MemoryExchange()

    def name_start(self, place: Place, deadline_s: float) -> None:
        """Tells this start from those before, where the job's store is kept by torchrun's agent.

        Args:
            place: Which rank of which job this is.
            deadline_s: Seconds that the other ranks are waited for.

        Raises:
            ExchangeError: The other ranks have not come.
        """
        global _start
        if place.world_size == 1 or _start is not None or stores.hosts_store(0):
            return
        store = stores.agents_store()
        exchange = TcpStoreExchange(stores.with_prefix("ncclsafe/starts", store))
        try:
            _start = agree_on_start(
                exchange,
                rank=place.rank,
                world_size=place.world_size,
                deadline_s=deadline_s,
                clear=lambda: stores.forget_last_start(store),
            )
        finally:
            exchange.close()

    def once_started(self, world_size: int) -> Exchange:
        """What the ranks share once there is a process group: the job's store, and files should that be lost."""
        if world_size == 1:
            return MemoryExchange()
        name = "ncclsafe" if _start is None else f"ncclsafe/{_start}"
        store = TcpStoreExchange(stores.own_connection(name), prefix=f"{next(_calls)}/")
        self._own_keys = store.published
        # A rank that begins a call has seen all ranks finish the one before, so that none reads what was before that.
        while len(_published) > 1:
            store.forget(_published.popleft())
        return FallbackExchange(store, self._files(_name_of_run(store)))

    def close(self) -> None:
        """The call has ended: what this rank has published is taken away in one of the next."""
        if self._own_keys:
            _published.append(self._own_keys)

    def _files(self, name: str) -> Exchange:
        files = DirectoryExchange(self._report_dir / f".exchange-{name}")
        return InTimeExchange(files, what=f"the report folder, {self._report_dir},")


def _name_of_run(store: Exchange) -> str:
    """A name that no other job, nor an earlier start of this one, has used."""
    mine = uuid.uuid4().hex[:12].encode()
    while True:
        try:
            return store.set_if_absent("run", mine).decode()
        except ExchangeError:
            # One missed deadline is no reason to go without a guard; after some the store is lost.
            if store.lost:
                raise


def meeting_place(strategy: Any) -> str:
    """A name on which the ranks of this start of this job agree without having met."""
    environment = strategy.cluster_environment
    assert environment is not None
    # Of several agents of torchrun, each counts restarts by itself.
    agents_count = "TORCHELASTIC_RESTART_COUNT" if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" else ""
    start = [os.environ[name] for name in _START_NAMES if name in os.environ and name != agents_count]
    return "-".join([environment.main_address, str(environment.main_port), *start])
