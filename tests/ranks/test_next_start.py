"""What one start leaves on the store of torchrun's agent, and what the next one finds there."""

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.exchange import TcpStoreExchange
from lightning_ncclsafe.guard.restarts import agree_on_start

FORK = multiprocessing.get_context("fork")
RANKS = 2
# What the agent keeps there for itself, and what is the user's own.
OTHERS = {"torch.rendezvous.job": "agents", "torchelastic/assigned_ranks/0": "[0, 1]", "mine": "1"}
SIGNAL = "exception_dump"


def keys_of(store: dist.TCPStore) -> set[str]:
    return {*store.list_keys()}  # type: ignore[attr-defined]


def run_start(port: int, folder: Path) -> list[int | None]:
    """Two ranks that the agent starts, and that leave without a word, as the guard has them leave."""
    processes = [FORK.Process(target=_rank, args=(rank, port, folder)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)
        process.kill()
    return [process.exitcode for process in processes]


def _rank(rank: int, port: int, folder: Path) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    store = stores.agents_store()
    exchange = TcpStoreExchange(stores.with_prefix("ncclsafe/starts", store))
    name = agree_on_start(
        exchange, rank=rank, world_size=RANKS, deadline_s=30, clear=lambda: stores.forget_last_start(store)
    )
    # By now all ranks know that rank 0 has cleared it, and none has made its process group.
    (folder / f"found-{name}-{rank}").write_text("\n".join(keys_of(store)))
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    stores.own_connection(f"{stores.start_prefix(name)}/0").set("verdict", "the run cannot go on")
    # NCCL's watchdog sets it beside all groups, on the store as it is.
    store.set(SIGNAL, "\0\0\0\0")
    os._exit(124)


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list a store's keys")
def test_the_next_start_finds_no_leftovers(tmp_path: Path) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key, value in OTHERS.items():
        agent.set(key, value)
    assert run_start(agent.port, tmp_path) == [124] * RANKS
    left = keys_of(agent)
    assert SIGNAL in left and any(key.startswith("default_pg/") for key in left)
    first = {path.name for path in tmp_path.iterdir()}
    assert run_start(agent.port, tmp_path) == [124] * RANKS
    found = [{*path.read_text().split("\n")} for path in tmp_path.iterdir() if path.name not in first]
    assert len(found) == RANKS
    for keys in found:
        assert OTHERS.keys() <= keys
        assert SIGNAL not in keys
        old = {key for key in left if key.endswith("/verdict")}
        assert old and old.isdisjoint(keys)
    # The one that comes later may find keys of the same names, of the other one's group.
    assert not all(any(key.startswith("default_pg/") for key in keys) for keys in found)


class Unlistable:
    """A store of an older release."""

    def __init__(self, store: dist.HashStore) -> None:
        self.delete_key = store.delete_key


def test_the_stop_signal_is_removed_from_a_store_without_key_listing() -> None:
    store = dist.HashStore()
    for key in (SIGNAL, *OTHERS):
        store.set(key, "1")
    stores.forget_last_start(Unlistable(store))
    assert not store.check([SIGNAL])
    assert store.check([*OTHERS])
