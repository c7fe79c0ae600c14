"""What exchanges do when what they stand on is gone."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lightning_ncclsafe.exchange import (
    DirectoryExchange,
    ExchangeError,
    FallbackExchange,
    MemoryExchange,
    TcpStoreExchange,
)

STORE_HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store_host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STORE_HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()


def exchange_with(port: int) -> TcpStoreExchange:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    return TcpStoreExchange(store, deadline_s=0.5)


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_store_that_does_not_answer_costs_one_deadline(
    store_host: tuple[subprocess.Popen[str], int], fate: signal.Signals
) -> None:
    process, port = store_host
    exchange = exchange_with(port)
    exchange.set("key", b"value")
    os.kill(process.pid, fate)
    if fate is signal.SIGKILL:
        process.wait()
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="store"):
        exchange.get_many(["key"])
    with pytest.raises(ExchangeError, match="store"):
        exchange.set("key", b"value")
    assert time.monotonic() - began < 2
    assert exchange.lost
    process.kill()
    exchange.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ncclsafe-store"]


def test_ranks_go_on_in_the_directory_when_the_store_is_lost(
    store_host: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    process, port = store_host
    ranks = [FallbackExchange(exchange_with(port), DirectoryExchange(tmp_path / "x")) for _ in range(2)]
    ranks[0].set("before", b"1")
    assert not (tmp_path / "x").exists()
    process.kill()
    process.wait()
    ranks[0].set("after", b"2")
    assert ranks[1].get_many(["before", "after"]) == {"after": b"2"}
    assert "store" in ranks[0].lost
    for rank in ranks:
        rank.close()


def test_files_are_private_to_the_user(tmp_path: Path) -> None:
    DirectoryExchange(tmp_path / "exchange").set("facts/0", b"secret")
    (file,) = (tmp_path / "exchange").iterdir()
    assert stat.S_IMODE((tmp_path / "exchange").stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    exchange = DirectoryExchange(tmp_path / "file" / "exchange")
    for call in (lambda: exchange.set("k", b""), lambda: exchange.set_if_absent("k", b"")):
        with pytest.raises(ExchangeError, match=r"file.exchange"):
            call()


def test_a_fallback_uses_the_first_while_it_works(tmp_path: Path) -> None:
    exchange = FallbackExchange(MemoryExchange(), DirectoryExchange(tmp_path / "x"))
    exchange.set("k", b"v")
    assert exchange.get_many(["k"]) == {"k": b"v"}
    assert not exchange.lost
    assert not (tmp_path / "x").exists()
