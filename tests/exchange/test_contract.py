"""What every exchange promises, asked of each of them."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from lightning_ncclsafe.exchange import (
    DirectoryExchange,
    Exchange,
    ExchangeError,
    FallbackExchange,
    InTimeExchange,
    MemoryExchange,
    SharedMemory,
    TcpStoreExchange,
)

MakeExchange = Callable[[], Exchange]


@pytest.fixture
def make_memory() -> MakeExchange:
    shared = SharedMemory()
    return lambda: MemoryExchange(shared)


@pytest.fixture
def make_directory(tmp_path: Path) -> MakeExchange:
    return lambda: DirectoryExchange(tmp_path / "exchange")


@pytest.fixture
def make_without_links(make_directory: MakeExchange, monkeypatch: pytest.MonkeyPatch) -> MakeExchange:
    """On a file system that has no hard links, as those over object stores and SMB."""

    def link(written: Path, path: Path) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    return make_directory


@pytest.fixture
def make_store() -> Iterator[MakeExchange]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    opened: list[Exchange] = []

    def make() -> Exchange:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
        opened.append(TcpStoreExchange(PrefixStore("ncclsafe", client)))
        return opened[-1]

    yield make
    for exchange in opened:
        exchange.close()


@pytest.fixture
def make_fallback(tmp_path: Path) -> MakeExchange:
    def make() -> Exchange:
        first = MemoryExchange()
        first.close()
        return FallbackExchange(first, DirectoryExchange(tmp_path / "fallback"))

    return make


@pytest.fixture
def make_in_time(tmp_path: Path) -> Iterator[MakeExchange]:
    opened: list[Exchange] = []

    def make() -> Exchange:
        opened.append(InTimeExchange(DirectoryExchange(tmp_path / "exchange"), what="the folder", deadline_s=10.0))
        return opened[-1]

    yield make
    for exchange in opened:
        exchange.close()


@pytest.fixture(params=["memory", "directory", "without_links", "store", "fallback", "in_time"])
def make(request: pytest.FixtureRequest) -> MakeExchange:
    return request.getfixturevalue(f"make_{request.param}")  # type: ignore[no-any-return]


def test_other_ranks_see_a_set_value(make: MakeExchange) -> None:
    mine, other = make(), make()
    mine.set("facts/3", b'{"rank":3}')
    assert other.get_many(["facts/2", "facts/3"]) == {"facts/3": b'{"rank":3}'}


def test_a_new_exchange_is_empty(make: MakeExchange) -> None:
    assert make().get_many(["log/0"]) == {}
    assert make().get_many([]) == {}


def test_a_value_can_be_replaced_and_may_be_empty(make: MakeExchange) -> None:
    exchange = make()
    exchange.set("key", b"old")
    exchange.set("key", b"")
    assert exchange.get_many(["key"]) == {"key": b""}


def test_the_first_value_set_wins_on_all_ranks(make: MakeExchange) -> None:
    exchanges = [make() for _ in range(4)]
    answers: dict[int, bytes] = {}
    start = threading.Barrier(len(exchanges))

    def set_as(rank: int) -> None:
        start.wait()
        answers[rank] = exchanges[rank].set_if_absent("log/0", str(rank).encode())

    threads = [threading.Thread(target=set_as, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stands = make().get_many(["log/0"])["log/0"]
    assert set(answers.values()) == {stands}


def test_keys_with_slashes_do_not_collide(make: MakeExchange) -> None:
    exchange = make()
    exchange.set("a/b", b"1")
    exchange.set("a%2Fb", b"2")
    exchange.set("../a", b"3")
    assert exchange.get_many(["a/b", "a%2Fb", "../a"]) == {"a/b": b"1", "a%2Fb": b"2", "../a": b"3"}


def test_a_megabyte_arrives_whole(make: MakeExchange) -> None:
    exchange, value = make(), bytes(range(32, 127)) * 11_000
    exchange.set("big", value)
    assert make().get_many(["big"]) == {"big": value}


def test_a_deleted_key_can_be_set_again(make: MakeExchange) -> None:
    mine, other = make(), make()
    mine.set("a/1", b"old")
    mine.set_if_absent("a/2", b"old")
    mine.set("b", b"stays")
    other.delete(key for key in ["a/1", "a/2", "never"])
    assert mine.get_many(["a/1", "a/2", "never", "b"]) == {"b": b"stays"}
    assert mine.set_if_absent("a/2", b"new") == b"new"
    assert other.get_many(["a/2"]) == {"a/2": b"new"}


def test_use_after_close_raises_a_clear_error(make: MakeExchange) -> None:
    exchange = make()
    exchange.close()
    exchange.close()
    for call in (lambda: exchange.set("k", b""), lambda: exchange.get_many(["k"]), lambda: exchange.delete(["k"])):
        with pytest.raises(ExchangeError, match="closed"):
            call()


def test_only_keys_of_an_earlier_exchange_are_removed() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=45))

    def at(prefix: str) -> TcpStoreExchange:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=45))
        return TcpStoreExchange(PrefixStore("ncclsafe", client), prefix=prefix, deadline_s=45.0)

    with closing(at("0/")) as first, closing(at("0/")) as other, closing(at("1/")) as second:
        before = server.num_keys()
        first.set_if_absent("run", b"a")
        for number in range(200):
            first.set(f"key/{number}", b"")
        first.delete(["key/7"])
        assert "0/key/7" not in first.published and len(first.published) == 200
        other.set("theirs", b"")
        second.set("key/1", b"new")
        assert second.get_many(["run", "theirs", "key/1"]) == {"key/1": b"new"}, "each exchange has its own keys"
        second.forget(first.published)
        # One thread makes all calls, one after the other.
        assert second.get_many(["key/1"]) == {"key/1": b"new"}
        assert server.num_keys() == before + 2
