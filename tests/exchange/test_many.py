"""Many keys and long values: what is asked of a store stays small enough for it to answer in time."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.exchange import Exchange, ExchangeError, TcpStoreExchange, in_parts
from lightning_ncclsafe.exchange.interface import AT_ONCE
from lightning_ncclsafe.exchange.tcp_store import MOST_BYTES
from lightning_ncclsafe.strategies import call_exchanges


class CountingStore:
    """A store in memory that counts its questions: each takes a message there and back."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.questions = 0
        self.most_at_once = 0

    def set_timeout(self, timeout: timedelta) -> None: ...

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.questions += 1
        self.most_at_once = max(self.most_at_once, len(keys))
        return [self.values[key] for key in keys]


def facts_of(*ranks: int) -> dict[str, bytes]:
    return {f"facts/{rank}": str(rank).encode() for rank in ranks}


@pytest.mark.parametrize(
    ("missing", "most"), [((), 2), ((5,), 15), ((5, 40), 27), (tuple(range(64)), 127)], ids=["none", "1", "2", "all"]
)
def test_missing_ranks_cost_only_a_few_requests(missing: tuple[int, ...], most: int) -> None:
    answered = facts_of(*(rank for rank in range(64) if rank not in missing))
    store = CountingStore(answered)
    exchange = TcpStoreExchange(store)
    assert exchange.get_many(facts_of(*range(64))) == answered
    assert store.questions <= most
    exchange.close()


def test_many_keys_are_requested_in_parts() -> None:
    store = CountingStore(facts_of(*range(1000)))
    exchange = TcpStoreExchange(store)
    keys = [f"facts/{rank}" for rank in range(1001)]
    assert max(map(len, in_parts(keys))) == AT_ONCE
    assert exchange.get_many(iter(keys)) == facts_of(*range(1000))
    assert store.most_at_once == AT_ONCE
    assert exchange.get_many([]) == {}
    exchange.close()


def test_an_oversized_value_is_refused_and_the_store_is_kept() -> None:
    store = CountingStore({})
    exchange = TcpStoreExchange(store)
    with pytest.raises(ExchangeError, match="takes no value of 8,000,001 bytes: facts/3"):
        exchange.set("facts/3", b"x" * (MOST_BYTES + 1))
    exchange.set("facts/3", b"short")
    assert exchange.get_many(["facts/3"]) == {"facts/3": b"short"}
    assert not exchange.lost
    exchange.close()


def test_repeated_trainer_calls_do_not_accumulate_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program may fit and validate any number of times in one process."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))

    def connect(prefix: str) -> Any:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
        return PrefixStore(prefix, client)

    monkeypatch.setattr(stores, "own_connection", connect)
    monkeypatch.setattr(call_exchanges, "_published", type(call_exchanges._published)())
    keys = []
    with closing_call(tmp_path) as outer:
        outer.set("card/0", b"outer")
        for number in range(8):
            with closing_call(tmp_path) as exchange:
                for key in ("card/0", "finished/0"):
                    exchange.set(key, str(number).encode())
                assert exchange.get_many(["card/0"]) == {"card/0": str(number).encode()}
                keys.append(server.num_keys())
        assert outer.get_many(["card/0"]) == {"card/0": b"outer"}, "the outer exchange still has its keys"
    assert keys[0] < keys[1] == keys[2] == keys[-1]


@contextmanager
def closing_call(folder: Path) -> Iterator[Exchange]:
    """The store of a call of the Trainer on two ranks."""
    call = call_exchanges.CallExchanges(folder)
    exchange = call.once_started(world_size=2)
    try:
        yield exchange
    finally:
        exchange.close()
        call.close()
