"""What exchanges do when what they stand on is gone."""

import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from own_threads import join_own_threads, own_threads
from polling import until
from torch.distributed import TCPStore

from lightning_ncclsafe.exchange import (
    DirectoryExchange,
    ExchangeError,
    FallbackExchange,
    InTimeExchange,
    MemoryExchange,
    SharedMemory,
    TcpStoreExchange,
)
from lightning_ncclsafe.exchange.fallback import MISSES_ALLOWED, NoAnswerError

# No process has this number.
NOBODY = (1 << 22) + 1
_FORK = multiprocessing.get_context("fork")
StoreHost = tuple[ForkProcess, int]


def host_store(tell_port: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tell_port.send(store.port)
    signal.pause()


@pytest.fixture
def store_host() -> Iterator[StoreHost]:
    """A process that hosts a store, and the port of that."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=host_store, args=(sender,), daemon=True)
    process.start()
    try:
        assert receiver.poll(30), "it has not started"
        yield process, receiver.recv()
    finally:
        process.kill()
        process.join()
        receiver.close()
        sender.close()


def exchange_with(port: int) -> TcpStoreExchange:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
    return TcpStoreExchange(store, deadline_s=0.5)


def stop(process: ForkProcess) -> None:
    """Stops a process, and waits until it is: its threads may answer for a while after ``kill`` has returned."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_a_stopped_store_host_is_given_up_after_three_deadlines(store_host: StoreHost) -> None:
    process, port = store_host
    exchange = exchange_with(port)
    exchange.set("key", b"value")
    stop(process)
    began = time.monotonic()
    for _ in range(MISSES_ALLOWED):
        assert not exchange.lost
        with pytest.raises(ExchangeError, match="did not answer within"):
            exchange.get_many(["key"])
    assert "3 times in a row" in exchange.lost
    assert time.monotonic() - began < 10
    process.kill()
    exchange.close()
    join_own_threads("store")


def test_a_store_that_misses_one_deadline_is_kept(store_host: StoreHost) -> None:
    process, port = store_host
    exchange = exchange_with(port)
    exchange.set("key", b"value")
    for _ in range(MISSES_ALLOWED):
        stop(process)
        with pytest.raises(ExchangeError, match="did not answer"):
            exchange.get_many(["key"])
        os.kill(process.pid, signal.SIGCONT)
        assert exchange.get_many(["key"]) == {"key": b"value"}
    assert not exchange.lost
    exchange.close()
    assert not own_threads("store")


def test_a_killed_store_host_is_given_up_at_once(store_host: StoreHost) -> None:
    process, port = store_host
    exchange = exchange_with(port)
    process.kill()
    process.join()
    with pytest.raises(ExchangeError, match="store"):
        exchange.set("key", b"value")
    assert exchange.lost
    exchange.close()
    assert not own_threads("store")


def test_a_lost_store_is_told_in_one_sentence_each_time() -> None:
    class Lost:
        def set_timeout(self, timeout: object) -> None:
            pass

        def set(self, key: str, value: object) -> None:
            raise RuntimeError("Failed to recv. Did the remote server shutdown or crash?")

    exchange = TcpStoreExchange(Lost())
    said = "The job's store cannot be used: RuntimeError: Failed to recv. Did the remote server shutdown or crash?"
    for _ in range(2):
        with pytest.raises(ExchangeError) as raised:
            exchange.set("key", b"value")
        assert str(raised.value) == said
    exchange.close()


def test_ranks_fall_back_to_the_directory_when_the_store_is_lost(store_host: StoreHost, tmp_path: Path) -> None:
    process, port = store_host
    ranks = [FallbackExchange(exchange_with(port), DirectoryExchange(tmp_path / "x")) for _ in range(2)]
    ranks[0].set("before", b"1")
    assert not (tmp_path / "x").exists()
    process.kill()
    process.join()
    ranks[0].set("after", b"2")
    assert ranks[1].get_many(["before", "after"]) == {"after": b"2"}
    assert "store" in ranks[0].lost
    for rank in ranks:
        rank.close()


def test_files_are_private_to_the_user(tmp_path: Path) -> None:
    DirectoryExchange(tmp_path / "exchange").set("facts/0", b"secret")
    assert stat.S_IMODE((tmp_path / "exchange").stat().st_mode) == 0o700
    # The value, and who has published.
    files = [*(tmp_path / "exchange").iterdir()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]


def test_each_rank_removes_its_files_and_the_last_one_the_folder(tmp_path: Path) -> None:
    ranks = [DirectoryExchange(tmp_path / "exchange") for _ in range(2)]
    for number, rank in enumerate(ranks):
        rank.set(f"facts/{number}", b"")
        rank.set_if_absent("log/0", b"")
    ranks[0].close()
    assert list(ranks[1].get_many(["facts/0", "facts/1"])) == ["facts/1"]
    ranks[1].close()
    assert not (tmp_path / "exchange").exists()


@pytest.mark.parametrize(
    ("host", "pid", "is_left"),
    [
        (socket.gethostname(), NOBODY, False),
        (socket.gethostname(), os.getppid(), True),
        ("another-host", NOBODY, True),
    ],
)
def test_the_last_rank_removes_files_of_a_killed_one(
    host: str, pid: int, is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, last = (DirectoryExchange(tmp_path / "exchange") for _ in range(2))
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: host)
        there.setattr(os, "getpid", lambda: pid)
        killed.set("facts/0", b"")
    last.set("facts/1", b"")
    last.close()
    assert (tmp_path / "exchange" / "facts%2F0").exists() is is_left
    assert (tmp_path / "exchange").exists() is is_left


def test_a_process_of_another_container_counts_as_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the name of the host, and a process id that is unknown here."""
    there, last = (DirectoryExchange(tmp_path / "exchange") for _ in range(2))
    with monkeypatch.context() as container:
        container.setattr("lightning_ncclsafe.exchange.directory.process_space", lambda: f"{socket.gethostname()}-0-1")
        container.setattr(os, "getpid", lambda: NOBODY)
        there.set("facts/0", b"")
    last.set("facts/1", b"")
    last.close()
    assert list(there.get_many(["facts/0"])) == ["facts/0"]


def test_a_zombie_does_not_count_as_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        killed, last = (DirectoryExchange(tmp_path / "exchange") for _ in range(2))
        with monkeypatch.context() as there:
            there.setattr(os, "getpid", lambda: child.pid)
            killed.set("facts/0", b"")
        last.set("facts/1", b"")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        last.close()
        assert not (tmp_path / "exchange").exists()
    finally:
        child.communicate()


@pytest.mark.parametrize(
    ("before", "meanwhile", "is_left"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_an_unused_report_folder_is_removed_with_the_files(
    before: bool, meanwhile: bool, is_left: bool, tmp_path: Path
) -> None:
    reports = tmp_path / "runs" / "ncclsafe"
    if before:
        reports.mkdir(parents=True)
    ranks = [DirectoryExchange(reports / ".exchange-x") for _ in range(2)]
    for rank in ranks:
        rank.set("log/0", b"")
    if meanwhile:
        (reports / "incident-1").mkdir()
    for rank in ranks:
        rank.close()
    assert reports.exists() is is_left
    assert not (reports / ".exchange-x").exists()


def test_an_exchange_without_files_removes_nothing(tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    exchange.set("facts/0", b"")
    DirectoryExchange(tmp_path / "exchange").close()
    assert [*exchange.get_many(["facts/0"])] == ["facts/0"]


def test_a_world_writable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "exchange").mkdir()
    (tmp_path / "exchange").chmod(0o777)
    with pytest.raises(ExchangeError, match="others may write"):
        DirectoryExchange(tmp_path / "exchange").set("key", b"")


def test_an_uncreatable_directory_raises_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    exchange = DirectoryExchange(tmp_path / "file" / "exchange")
    for call in (lambda: exchange.set("k", b""), lambda: exchange.set_if_absent("k", b"")):
        with pytest.raises(ExchangeError, match=r"file.exchange"):
            call()


def test_a_value_deleted_during_set_if_absent_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a rank that switches to the job's store and removes its files."""
    exchange = DirectoryExchange(tmp_path / "x")

    def taken(written: Path, path: Path) -> None:
        raise FileExistsError(path)

    monkeypatch.setattr(os, "link", taken)
    with pytest.raises(ExchangeError, match=r"The value of key in the folder .* is gone"):
        exchange.set_if_absent("key", b"value")
    exchange.close()


def test_a_fallback_removes_its_files_even_if_the_first_close_fails(tmp_path: Path) -> None:
    class Stuck(MemoryExchange):
        lost = "the store is gone"

        def set(self, key: str, value: bytes) -> None:
            raise ExchangeError(self.lost)

        def close(self) -> None:
            raise TimeoutError

    exchange = FallbackExchange(Stuck(), DirectoryExchange(tmp_path / "x"))
    exchange.set("k", b"v")
    assert (tmp_path / "x").exists()
    with pytest.raises(TimeoutError):
        exchange.close()
    assert not (tmp_path / "x").exists()


def test_a_fallback_uses_the_first_exchange_while_it_works(tmp_path: Path) -> None:
    exchange = FallbackExchange(MemoryExchange(), DirectoryExchange(tmp_path / "x"))
    exchange.set("k", b"v")
    assert exchange.get_many(["k"]) == {"k": b"v"}
    assert not exchange.lost
    assert not (tmp_path / "x").exists()


def test_unresponsive_storage_is_given_up() -> None:
    answers, asked = threading.Event(), list[str]()

    class Dead(MemoryExchange):
        def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
            asked.append("get")
            answers.wait(30)
            return {}

        def close(self) -> None:
            asked.append("close")

    exchange = InTimeExchange(Dead(), what="the folder", deadline_s=0.1)
    try:
        for _ in range(3):
            assert not exchange.lost
            with pytest.raises(ExchangeError, match=r"the folder did not answer within 0.1 s"):
                exchange.get_many(["log/0"])
        assert exchange.lost == "the folder did not answer within 0.1 s, 3 times in a row"
        with pytest.raises(ExchangeError, match="3 times in a row"):
            exchange.set("log/0", b"")
        exchange.close()
        assert asked == ["get"]
    finally:
        answers.set()
    join_own_threads("files")
    assert asked[-1] == "close", "once storage answers again"
    exchange.close()


def test_an_unused_exchange_has_no_thread_and_one_miss_is_tolerated() -> None:
    unused = InTimeExchange(MemoryExchange(), what="the folder")
    assert not own_threads("files")
    unused.close()
    answers = threading.Event()

    class Late(MemoryExchange):
        def set(self, key: str, value: bytes) -> None:
            answers.wait(30)
            super().set(key, value)

    exchange = InTimeExchange(Late(), what="the folder", deadline_s=1.0)
    for value in (b"first", b"second"):
        answers.clear()
        for _ in range(MISSES_ALLOWED - 1):
            with pytest.raises(ExchangeError, match="did not answer"):
                exchange.set("k", value)
        answers.set()
        assert exchange.get_many(["k"]) == {"k": value}, "an answer resets the count"
    assert not exchange.lost
    exchange.close()
    assert not own_threads("files")
    with pytest.raises(ExchangeError, match="after it was closed"):
        exchange.get_many(["k"])


def test_a_closed_exchange_releases_its_connection(store_host: StoreHost) -> None:
    """At once, even while its user still exists or has not been garbage-collected yet."""
    process, port = store_host
    open_files = Path(f"/proc/{process.pid}/fd")
    exchange = exchange_with(port)
    exchange.set("key", b"value")
    before = len([*open_files.iterdir()])
    exchange.close()
    until(lambda: len([*open_files.iterdir()]) == before - 1, within_s=10)
    with pytest.raises(ExchangeError, match="after it was closed"):
        exchange.get_many(["key"])


def test_closing_during_the_first_use_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = InTimeExchange(MemoryExchange(), what="the folder", deadline_s=5.0)
    start, closing = threading.Thread.start, threading.Thread(target=exchange.close)

    def close_and_start(thread: threading.Thread) -> None:
        """Closes it when its thread is about to start, and looks whether that is over before."""
        start(closing)
        closing.join(0.2)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", close_and_start)
        exchange.set("k", b"v")
    closing.join(10.0)
    assert not own_threads("files")


class LateStore(MemoryExchange):
    """A store whose host does not answer this rank in time."""

    lost_after = False

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        if self.lost_after:
            self.lost = "it did not answer"
            raise ExchangeError("it did not answer") from NoAnswerError("it did not answer")
        return super().get_many(keys)


def two_ranks() -> tuple[FallbackExchange, FallbackExchange, LateStore]:
    """Two ranks on a store and files; the store of the first one can fail."""
    store, files = SharedMemory(), SharedMemory()
    late = LateStore(store)
    first = FallbackExchange(late, MemoryExchange(files))
    return first, FallbackExchange(MemoryExchange(store), MemoryExchange(files)), late


def test_a_rank_follows_another_that_has_lost_the_store() -> None:
    first, second, late = two_ranks()
    first.set("key", b"on the store")
    assert not second.follow() and not second.lost
    late.lost_after = True
    assert first.get_many(["key"]) == {}, "it is on the store"
    first.set("key", b"on files")
    assert second.get_many(["key"]) == {"key": b"on the store"}
    assert second.follow()
    assert second.lost == "another rank has given up the first one: it did not answer"
    assert not second.follow(), "once"
    assert second.get_many(["key"]) == {"key": b"on files"}


def test_nobody_is_told_of_a_store_whose_host_has_died() -> None:
    """All ranks lose it, at the same moment."""
    first, second, late = two_ranks()
    first.set("facts/0", b"of 0")
    late.close()
    assert first.get_many(["facts/0"]) == {} and first.lost
    assert not second.follow()
