"""The process beside a rank that is alone on its host; here that rank is a program that only sleeps."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from own_threads import join_own_threads
from polling import until
from witnesses import STARTS_S, attending, witnesses

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.exchange import DirectoryExchange, Exchange, MemoryExchange, SharedMemory, TcpStoreExchange
from lightning_ncclsafe.facts import Incident, IncidentKind, ProcessFacts, codec
from lightning_ncclsafe.guard import witness
from lightning_ncclsafe.guard.ending import say_goodbye
from lightning_ncclsafe.guard.gathering import ANSWER_S, Gathering
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.guard.shared import IncidentEntry
from lightning_ncclsafe.guard.witness import Witness
from lightning_ncclsafe.probes.rank_info import RankInfo, info_key

SUSPECT = Verdict(incident=Incident(number=1, kind=IncidentKind.SUSPECT, opened_by=0), answer="because")
LIMIT = Verdict(incident=Incident(number=2, kind=IncidentKind.TIMEOUT, opened_by=0), answer="because", frozen=(1,))


def attended(shared: SharedMemory, looks: list[int]) -> Verdict | None:
    """Takes part in a round for rank 1, which is one of two; the verdict comes some time later."""

    def look(silent: object) -> list[ProcessFacts]:
        looks.extend(peer.rank for peer in silent)  # type: ignore[attr-defined]
        return [ProcessFacts(rank=rank, pid=7, state="stopped") for rank in looks]

    peers = (RankInfo(rank=1, host="b", pid=7),)
    gathering = Gathering(MemoryExchange(shared), round_number=3, rank=1, world_size=2, peers=peers, witness=look)
    later = threading.Timer(
        ANSWER_S + 0.5, lambda: MemoryExchange(shared).set("round/3/verdict", codec.encode(SUSPECT))
    )
    later.start()
    try:
        return gathering.attend()
    finally:
        later.join()


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_is_looked_at_if_it_does_not_answer(answers: bool) -> None:
    shared, looks = SharedMemory(), list[int]()
    exchange = MemoryExchange(shared)
    if answers:
        exchange.set("round/3/here/1", b"")
    assert attended(shared, looks) == SUSPECT
    assert looks == ([] if answers else [1])
    assert ("round/3/witness/1" in shared.values) == (not answers)
    # It is no rank: the reporter waits for none but ranks, and what they have published is theirs.
    assert not exchange.get_many(["round/3/seen/1"])


def test_a_rank_that_has_left_the_round_with_its_answer_is_not_looked_at() -> None:
    shared, looks = SharedMemory(), list[int]()
    MemoryExchange(shared).set("round/3/verdict", codec.encode(SUSPECT))
    assert attended(shared, looks) == SUSPECT
    assert not looks
    assert "round/3/witness/1" not in shared.values


class Beside:
    """A program that sleeps, as the only rank of a host, and its witness; rank 0 is the test.

    Attributes:
        folder: Where the ranks share if the store is lost.
        exchange: That of rank 0.
    """

    def __init__(self, said: list[str], folder: Path) -> None:
        self.folder = folder
        self.rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.exchange: Exchange = TcpStoreExchange(dist.PrefixStore("job/0", self.store.clone()))
        started = psutil.Process(self.rank.pid).create_time()
        self.exchange.set(info_key(1), codec.encode(RankInfo(rank=1, host="b", pid=self.rank.pid, started=started)))
        self.witness = Witness(said.append)
        self.end: Callable[[], None] = lambda: None

    def begin(self, prefix: str = "job/0", longest_s: float = 600.0) -> psutil.Process:
        """Begins a call; returns the witness's process once it attends."""
        keys = stores.Address(host="127.0.0.1", port=self.store.port, prefix=prefix)
        self.end = self.witness.begin(rank=1, world_size=2, keys=keys, folder=str(self.folder), longest_s=longest_s)
        return attending()

    def ask(self, number: int, verdict: Verdict) -> ProcessFacts:
        """What the witness says in a round, with the verdict on it."""
        self.exchange.set(f"log/{number}", codec.encode(IncidentEntry(incident=verdict.incident)))
        key = f"round/{number}/witness/1"
        found = until(lambda: self.exchange.get_many([key]).get(key), within_s=STARTS_S)
        self.exchange.set(f"round/{number}/verdict", codec.encode(verdict))
        return codec.decode(ProcessFacts, found)


def has_ended(process: psutil.Process) -> Callable[[], bool]:
    return lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def beside(said: list[str], tmp_path: Path) -> Iterator[Beside]:
    made = Beside(said, tmp_path / "exchange")
    yield made
    made.rank.kill()
    made.rank.wait()
    for one in witnesses():
        one.kill()
    made.exchange.close()
    join_own_threads("store")


def test_how_a_rank_that_was_alone_has_ended(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_LEAVE_S", 0.0)
    process = beside.begin(longest_s=30.0)
    # Nobody who waits for the rank's children, or for the end of its output, waits for it.
    assert process.ppid() != os.getpid()
    assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (1, 2)} == {os.devnull}
    assert "LOCAL_RANK" not in process.environ()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(ignored)
    beside.rank.send_signal(signal.SIGSTOP)
    assert beside.ask(0, SUSPECT).state == "stopped"
    # The rank takes the store along, and the others go on with files.
    beside.exchange.close()
    beside.store = None  # type: ignore[assignment]
    beside.exchange = DirectoryExchange(beside.folder)
    beside.rank.kill()
    beside.rank.wait()
    ended = beside.ask(1, SUSPECT)
    assert (ended.rank, ended.pid, ended.state) == (1, beside.rank.pid, "gone")
    # It attends as long as the others may ask, and no longer; the last one to leave removes the files.
    beside.exchange.close()
    assert until(has_ended(process), within_s=STARTS_S)
    assert not beside.folder.exists()


def test_a_frozen_rank_is_killed_at_the_limit_once_the_others_have_left(beside: Beside) -> None:
    beside.begin()
    beside.rank.send_signal(signal.SIGSTOP)
    assert beside.ask(0, replace(LIMIT, ends_run=True)).state == "stopped"
    beside.rank.send_signal(signal.SIGCONT)
    say_goodbye(beside.exchange, 0)
    # It attends the next round, and so it has left alone a rank that goes on.
    assert beside.ask(1, SUSPECT).state == "sleeping"
    assert beside.rank.poll() is None
    beside.exchange.delete(["left/0"])
    beside.rank.send_signal(signal.SIGSTOP)
    assert beside.ask(2, replace(LIMIT, ends_run=True)).state == "stopped"
    # A launcher may end them with the first, and they may still save the state of the run.
    with pytest.raises(subprocess.TimeoutExpired):
        beside.rank.wait(1.0)
    say_goodbye(beside.exchange, 0)
    assert beside.rank.wait(STARTS_S) == -signal.SIGKILL


def test_the_next_call_has_the_same_witness_which_ends_with_the_program(
    beside: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Modules of the working directory are not those of the program.
    (tmp_path / "psutil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    # What the program's path has besides: Python takes no notice of the first, and cannot be told the second.
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, f"{tmp_path}:{tmp_path}"])
    process = beside.begin()
    assert not (tmp_path / "was_run").exists()
    beside.end()
    assert beside.begin() == process
    assert beside.ask(0, SUSPECT).state == "sleeping"
    beside.end()
    beside.end = lambda: None
    beside.witness = Witness()
    assert until(has_ended(process), within_s=STARTS_S)


def test_a_call_within_a_call_ends_before_it_and_both_before_the_next_start(beside: Beside) -> None:
    process = beside.begin()
    outer, before = beside.end, beside.exchange
    beside.exchange = TcpStoreExchange(dist.PrefixStore("job/1", beside.store.clone()))
    beside.exchange.set(info_key(1), before.get_many([info_key(1)])[info_key(1)])
    assert beside.begin("job/1") == process
    assert beside.ask(0, SUSPECT).state == "sleeping"
    beside.end()
    beside.exchange.close()
    beside.exchange.close()
    beside.exchange, beside.end = before, outer
    assert beside.ask(0, SUSPECT).state == "sleeping"
    beside.rank.kill()
    beside.rank.wait()
    assert beside.ask(1, SUSPECT).state == "gone"
    # The next start begins with a store that has nothing of the last one.
    beside.exchange.delete([info_key(1)])
    assert until(has_ended(process), within_s=STARTS_S)


@pytest.mark.parametrize("executable", ["/nowhere/python", "", None])
def test_one_that_cannot_be_started_is_done_without(
    executable: str | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    one = Witness(said.append)
    keys = stores.Address(host="127.0.0.1", port=1, prefix="job/0")
    for _ in range(2):
        one.begin(rank=1, world_size=2, keys=keys, folder="/nowhere", longest_s=1.0)()
    (line,) = said
    assert line.startswith("rank 1: no process can be started beside this rank")
    assert (executable or "sys.executable is empty") in line


def test_a_program_that_closes_all_descriptors_keeps_its_files(tmp_path: Path) -> None:
    one, (inner, other) = Witness(), socket.socketpair()
    one._socket, number = inner, inner.fileno()
    with (tmp_path / "own").open("wb") as own, other:
        os.dup2(own.fileno(), number)
        one._tell(b"")
        os.write(number, b"mine")
    assert (tmp_path / "own").read_bytes() == b"mine"
    os.close(number)
