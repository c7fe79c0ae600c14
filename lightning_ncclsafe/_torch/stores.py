"""Connections to the job's key-value store."""

import os
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_ncclsafe._torch.build import c10d
from lightning_ncclsafe.code.marks import Mark, marked


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a process that has no process group finds keys on a job's store.

    Attributes:
        host: The store's host, as this rank reaches it.
        port: Its port.
        prefix: What the keys begin with.
    """

    host: str
    port: int
    prefix: str


def own_connection(prefix: str) -> Any:
    """Another connection to the job's store, for keys that no other start of the job has used.

    The default group's store object must not be shared: its socket is locked while the main thread waits in it.

    Returns:
        A ``torch.distributed.Store``.

    Raises:
        RuntimeError: If the store cannot be cloned (a user's own store type) or its host cannot be reached.
    """
    return with_prefix(_own_prefix(prefix), _whole_store())


def own_address(prefix: str) -> Address | None:
    """Where another process finds what :func:`own_connection` does; None if the job's store is no TCPStore."""
    store = _whole_store()
    if not isinstance(store, c10d.TCPStore):
        return None
    return Address(host=store.host, port=store.port, prefix=_own_prefix(prefix))


def connection_to(address: Address) -> Any:
    """A connection of a process that has no process group.

    Raises:
        RuntimeError: If the store cannot be reached.
    """
    store = c10d.TCPStore(address.host, address.port, None, False, timedelta(seconds=30))
    return dist.distributed_c10d.PrefixStore(address.prefix, store)


def _whole_store() -> Any:
    """The job's store without what launchers and PyTorch put before their keys, which other processes do not know."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    return store


def _own_prefix(prefix: str) -> str:
    """One that all ranks of this start have, and no other start on the same store."""
    default: Any = dist.distributed_c10d._get_default_store()
    own = with_prefix(prefix, default)
    return f"{prefix}/{own.compare_set('start', '', uuid.uuid4().hex[:12]).decode()}"


@marked(Mark.STORE)
def agents_store() -> Any:
    """Another connection to the store of torchrun's agent, from before there is a process group.

    Raises:
        RuntimeError: If it cannot be reached.
    """
    timeout = timedelta(seconds=30)
    return c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout)


def with_prefix(prefix: str, store: Any) -> Any:
    """The part of a store whose keys begin with a prefix."""
    return dist.distributed_c10d.PrefixStore(prefix, store.clone())


# The key that NCCL's watchdogs set at an error, for the monitors of all ranks: they dump, wait eight minutes and abort.
_ERROR_KEY = "exception_dump"
# The keys of starts that have names; those with which ranks agree on a name have another prefix.
_STARTS = "ncclsafe/start/"


def start_prefix(name: str) -> str:
    """The prefix of the keys of a start that has a name, as torchrun's agent keeps keys of earlier starts."""
    return f"{_STARTS}{name}"


def forget_last_start(store: Any) -> None:
    """Deletes what an earlier start left on the store of torchrun's agent, before ranks make their process group.

    Ranks of this start would use its addresses for each other (pytorch/pytorch#135712), and the monitor of NCCL's
    watchdogs would take an error of the last start for a new one, and abort a healthy run.
    """
    if dist.is_initialized():
        return
    store.delete_key(_ERROR_KEY)
    if hasattr(store, "list_keys"):
        for key in store.list_keys():
            # Keys of its groups, of users of its store, and of this package, which are outside of all others.
            if key.startswith(("default_pg/", _STARTS)):
                store.delete_key(key)


@marked(Mark.STORE)
def launched_store(host: str, port: int, rank: int, *, timeout_s: float = 30.0) -> Any:
    """The store of a job without a process group, found by the launcher's environment variables.

    Args:
        host: ``MASTER_ADDR``.
        port: ``MASTER_PORT``.
        rank: Global rank; 0 hosts the store, unless torchrun's agent does.
        timeout_s: How long to wait for the host, seconds.

    Returns:
        A ``torch.distributed.Store``.

    Raises:
        RuntimeError: If it cannot be reached.
    """
    timeout = timedelta(seconds=timeout_s)
    store = c10d.TCPStore(host, port, None, hosts_store(rank), timeout, wait_for_workers=False)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.distributed_c10d.PrefixStore(f"ncclsafe/launched/{restart}", store)


def hosts_store(rank: int) -> bool:
    """Whether the job's store lives in the process of this rank, so that it dies with it.

    torchrun's agent hosts the store itself and says so in the environment; otherwise rank 0 does.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
