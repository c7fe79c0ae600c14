"""The exchanges of one call of the Trainer, with keys and files that no other call, start or job has used."""

import itertools
import math
import os
import uuid
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.exchange import (
    DirectoryExchange,
    Exchange,
    ExchangeError,
    FallbackExchange,
    InTimeExchange,
    MemoryExchange,
    TcpStoreExchange,
    keep_trying,
)
from lightning_ncclsafe.guard.restarts import agree_on_start
from lightning_ncclsafe.guard.shared import Place

# Variables that differ between the starts of a job by torchrun and SLURM, as a restart may use the same port.
_START_NAMES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")

# A store that is there answers within milliseconds; without an answer, its client would try for half an hour.
_CONNECTS_S = 1.0

# Each guarded call has its own keys on the store; ranks call fit, validate, … in the same order.
_calls = itertools.count()
# The last of them, and the saves since: a rank that saves alone must not change the numbers of later calls.
_last, _saves = "", itertools.count()
# Keys that this rank published in earlier calls; a program may make any number of calls.
_published: deque[set[str]] = deque()
# The name of this start, if the store may hold keys of an earlier one; the same for all calls.
_start: str | None = None


class CallExchanges:
    """Makes the exchanges of one call.

    Args:
        report_dir: The folder of reports, which also holds the folders of file exchanges.

    Attributes:
        fallback: The folder of the file exchange that is used if the job's store is lost.
    """

    def __init__(self, report_dir: Path) -> None:
        self._report_dir = report_dir
        self._own_keys: set[str] = set()
        self._name = self._number = self._save = ""
        self.fallback = Path()

    def before_start(self, strategy: Any) -> Exchange:
        """The exchange before there is a process group."""
        return self._files(self._folder(meeting_place(strategy))) if strategy.world_size > 1 else MemoryExchange()

    def name_start(self, place: Place, deadline_s: float) -> None:
        """Gives this start its own name, if torchrun's agent keeps the job's store across starts."""
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
        """The exchange once there is a process group: the job's store, and files if that is lost."""
        global _last, _saves
        if world_size == 1:
            return MemoryExchange()
        _last, _saves = str(next(_calls)), itertools.count()
        return self._on_store(_last)

    def count_save(self) -> None:
        """A save after the last call begins: ranks count them alike, although not each of them needs an exchange."""
        self._save = f"{_last}/save/{next(_saves)}"

    def of_save(self) -> Exchange:
        """The exchange of that save; in memory if the store is gone, as its host may have left."""
        try:
            return SideThread("ncclsafe-save").call(lambda: self._on_store(self._save), _CONNECTS_S)
        except (UnansweredError, ExchangeError, RuntimeError):
            return MemoryExchange()

    def _on_store(self, number: str) -> Exchange:
        name = "ncclsafe" if _start is None else stores.start_prefix(_start)
        self._name, self._number = name, number
        store = TcpStoreExchange(stores.own_connection(name), prefix=f"{number}/")
        self._own_keys = store.published
        # A rank that begins a call has seen all ranks finish the call before, so that no rank reads older keys.
        while len(_published) > 1:
            store.forget(_published.popleft())
        self.fallback = self._folder(_name_of_run(store))
        return FallbackExchange(store, self._files(self.fallback))

    def keys(self) -> stores.Address | None:
        """Where another process finds the keys of this call on the job's store; None if it cannot."""
        found = stores.own_address(self._name) if self._name else None
        return replace(found, prefix=f"{found.prefix}/{self._number}") if found is not None else None

    def close(self) -> None:
        """The call has ended: one of the next calls deletes the keys of this rank."""
        if self._own_keys:
            _published.append(self._own_keys)

    def _folder(self, name: str) -> Path:
        return self._report_dir / f".exchange-{name}"

    def _files(self, folder: Path) -> Exchange:
        return InTimeExchange(DirectoryExchange(folder), what=f"the report folder, {self._report_dir},")


def _name_of_run(store: Exchange) -> str:
    """A name that no other job or earlier start has used."""
    mine = uuid.uuid4().hex[:12].encode()
    return keep_trying(store, lambda: store.set_if_absent("run", mine), deadline_s=math.inf).decode()


def meeting_place(strategy: Any) -> str:
    """A name for this start of this job that all ranks derive alike, without communication."""
    environment = strategy.cluster_environment
    assert environment is not None
    # Each agent of torchrun counts restarts by itself.
    agents_count = "TORCHELASTIC_RESTART_COUNT" if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" else ""
    start = [os.environ[name] for name in _START_NAMES if name in os.environ and name != agents_count]
    return "-".join([environment.main_address, str(environment.main_port), *start])
