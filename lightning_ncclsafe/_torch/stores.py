"""Connections to the job's key-value store."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_ncclsafe._torch.build import c10d
from lightning_ncclsafe.code.marks import Mark, marked


def own_connection(prefix: str) -> Any:
    """Another connection to the job's store, under a prefix.

    The default group's store object must not be shared: its socket is locked while the main thread waits in it.

    Returns:
        A ``torch.distributed.Store``.

    Raises:
        RuntimeError: If the store cannot be cloned (a user's own store type) or its host cannot be reached.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(prefix, default.clone())


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
            # Keys of its groups, and of users of its store, such as this package.
            if key.startswith("default_pg/"):
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
