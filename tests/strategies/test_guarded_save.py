"""Saves of a checkpoint outside of a call of the Trainer: when they are watched, and what that does to other calls."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_ncclsafe import CollectiveTimeoutError, SafeDDP
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.strategies import call_exchanges, guarded, guarded_call, guarded_save
from lightning_ncclsafe.strategies.call_exchanges import CallExchanges

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:27010")


class Trainer:
    """What a strategy sees of one."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []
        self.default_root_dir = "."
        self.profiler = PassThroughProfiler()
        self.state = SimpleNamespace(fn="fit", stage=None)
        self.saved: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.meanwhile = lambda: None

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saved.append((args, kwargs))
        self.meanwhile()
        if self.error is not None:
            raise self.error


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """In place of the guard of each save, which otherwise is made when a test wants it; no call has one."""
    guard = MagicMock()
    guard.return_value.failed.return_value = None
    monkeypatch.setattr(guarded_call, "Guard", guard)
    monkeypatch.setattr(guarded_call, "RankProbe", MagicMock())
    monkeypatch.setattr(guarded, "GuardedCall", MagicMock())
    monkeypatch.setattr(guarded, "distributed_is_initialized", lambda: True)
    monkeypatch.setattr(CallExchanges, "of_save", lambda self: MemoryExchange())
    monkeypatch.setattr(guarded_save, "_SHORT_S", 1000.0)
    yield guard
    assert not [thread for thread in threading.enumerate() if thread.name == "ncclsafe-save"], "a thread is left"


def trained(world_size: int = 2) -> Trainer:
    """A Trainer whose call has returned."""
    strategy: Any = SafeDDP()
    strategy._world_size = world_size
    strategy.cluster_environment = MagicMock()
    strategy.cluster_environment.world_size.return_value = world_size
    strategy.set_world_ranks = lambda: None
    strategy.parallel_devices = [None] * world_size
    trainer = Trainer()
    trainer.strategy = strategy  # type: ignore[attr-defined]
    for _ in range(2):
        with strategy.watch(trainer):
            trainer.save_checkpoint("within")
    assert trainer.saved == [(("within",), {})] * 2
    trainer.saved.clear()
    return trainer


def test_a_short_save_is_counted_and_makes_no_guard(guard: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[CallExchanges] = []
    monkeypatch.setattr(CallExchanges, "count_save", lambda self: counted.append(self))
    trainer = trained()
    assert not counted
    trainer.save_checkpoint("last.ckpt", weights_only=True)
    assert len(counted) == 1
    assert trainer.saved == [(("last.ckpt",), {"weights_only": True})]
    guard.assert_not_called()


def test_a_long_save_has_a_guard_until_it_ends(guard: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, connected = trained(), threading.Event()
    monkeypatch.setattr(guarded_save, "_SHORT_S", 0.0)
    guard.return_value.connect.side_effect = lambda exchange, *, meets: connected.set()

    def meanwhile() -> None:
        assert connected.wait(20)
        guard.return_value.close.assert_not_called()

    trainer.meanwhile = meanwhile
    trainer.save_checkpoint("last.ckpt")
    guard.return_value.close.assert_called_once_with()
    guard.return_value.finish.assert_not_called()
    guard.return_value.failed.assert_not_called()


def test_a_broken_connection_is_reported_at_once_and_explained_instead(guard: MagicMock) -> None:
    trainer = trained()
    trainer.error, known = BROKEN, CollectiveTimeoutError("Rank 1 has left.")
    guard.return_value.failed.return_value = known
    with pytest.raises(CollectiveTimeoutError) as caught:
        trainer.save_checkpoint("last.ckpt")
    assert caught.value is known
    assert caught.value.__cause__ is BROKEN
    guard.return_value.failed.assert_called_once_with(BROKEN)
    guard.return_value.close.assert_called_once_with()


def test_what_a_program_may_catch_is_only_told_to_ranks_that_ask(guard: MagicMock) -> None:
    trainer = trained()
    trainer.error = OSError("no space left")
    with pytest.raises(OSError, match="no space left"):
        trainer.save_checkpoint("last.ckpt")
    guard.return_value.share_last_facts.assert_called_once_with(trainer.error)
    guard.return_value.failed.assert_not_called()


def test_a_guard_that_cannot_be_made_says_so_once_and_the_save_goes_on(
    guard: MagicMock, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = trained()
    guard.side_effect = ZeroDivisionError("ours")
    trainer.error = BROKEN
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        trainer.save_checkpoint("last.ckpt")
    assert capfd.readouterr().err.count("ZeroDivisionError") == 1


def test_a_thread_that_cannot_be_started_does_not_keep_a_save(
    guard: MagicMock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    trainer = trained()
    monkeypatch.setattr(threading.Thread, "start", start)
    trainer.save_checkpoint("last.ckpt")
    assert trainer.saved == [(("last.ckpt",), {})]
    assert "can't start new thread" in capsys.readouterr().err


@pytest.mark.parametrize("why", ["one rank", "no group", "ended"])
def test_what_waits_for_nobody_is_not_watched(guard: MagicMock, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    trainer = trained(world_size=1 if why == "one rank" else 2)
    monkeypatch.setattr(guarded, "distributed_is_initialized", lambda: why != "no group")
    if why == "ended":
        trainer.strategy._ending.close(lambda: CollectiveTimeoutError("over"))  # type: ignore[attr-defined]
    monkeypatch.setattr(guarded, "GuardedSave", MagicMock(side_effect=AssertionError))
    trainer.save_checkpoint("last.ckpt")
    assert trainer.saved == [(("last.ckpt",), {})]


class Store:
    """Keys on the store of the process group."""

    published: frozenset[str] = frozenset()
    lost = ""

    def __init__(self, connection: object, *, prefix: str) -> None:
        self.prefix = prefix

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        return value


def number_of(exchange: Any) -> str:
    return str(exchange._first.prefix)


def test_the_save_of_one_rank_does_not_change_the_keys_of_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_exchanges, "TcpStoreExchange", Store)
    monkeypatch.setattr(call_exchanges.stores, "own_connection", lambda name: None)
    monkeypatch.setattr(call_exchanges, "_calls", itertools.count(7))

    def of_save(*, is_long: bool = True) -> str:
        exchanges = CallExchanges(tmp_path)
        exchanges.count_save()
        return number_of(exchanges.of_save()) if is_long else ""

    def of_call() -> str:
        return number_of(CallExchanges(tmp_path).once_started(2))

    numbers = [of_call(), of_save(), of_save(is_long=False), of_save(), of_call(), of_save()]
    assert numbers == ["7/", "7/save/0/", "", "7/save/2/", "8/", "8/save/0/"]


def test_a_store_that_has_gone_with_its_host_does_not_hold_up_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(call_exchanges.stores, "own_connection", lambda name: released.wait(20))
    monkeypatch.setattr(call_exchanges, "_CONNECTS_S", 0.01)
    exchange = CallExchanges(tmp_path).of_save()
    assert isinstance(exchange, MemoryExchange)
    assert not released.is_set()
    released.set()
