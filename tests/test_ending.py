"""Ending a run: by abort where the main thread can be woken, by exit where it cannot."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from lightning_ncclsafe import _torch, ending
from lightning_ncclsafe.exchange import MemoryExchange, SharedMemory
from lightning_ncclsafe.probes.rank import Card


class Exited(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    happened: list[str] = []

    def leave(code: int) -> None:
        happened.append(f"exit {code}")
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(ending, "ABORT_GRACE_S", 0.2)
    return happened


def end(
    *, rank: int = 1, left: threading.Event | None = None, kill: Callable[[], None] = lambda: None
) -> MemoryExchange:
    exchange = MemoryExchange()
    ending.end_run(
        exchange=exchange,
        rank=rank,
        world_size=2,
        main_thread_left=left or threading.Event(),
        write_logs=lambda _: None,
        before_exit=kill,
    )
    return exchange


def nccl(monkeypatch: pytest.MonkeyPatch, abort: Callable[[], None]) -> None:
    monkeypatch.setattr(_torch, "groups_can_be_aborted", lambda: True)
    monkeypatch.setattr(_torch, "abort_groups", abort)


def test_a_main_thread_that_the_abort_wakes_leaves_by_itself(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    nccl(monkeypatch, left.set)
    end(left=left)
    assert events == []


def test_a_main_thread_that_does_not_come_back_is_not_waited_for(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl(monkeypatch, lambda: events.append("aborted"))
    with pytest.raises(Exited):
        end()
    assert events == ["aborted", f"exit {ending.EXIT_CODE}"]


def test_an_abort_that_hangs_does_not_hold_up_the_end(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    nccl(monkeypatch, lambda: (never.wait(), None)[1])
    with pytest.raises(Exited):
        end()
    assert events == [f"exit {ending.EXIT_CODE}"]
    never.set()


def test_without_an_abort_the_process_exits_and_ends_what_it_launched(events: list[str]) -> None:
    with pytest.raises(Exited):
        end(kill=lambda: events.append("killed"))
    assert events == ["killed", f"exit {ending.EXIT_CODE}"]


def test_the_host_of_the_store_leaves_last(events: list[str]) -> None:
    shared = SharedMemory()
    threading.Timer(0.1, lambda: (events.append("other left"), ending.say_goodbye(MemoryExchange(shared), 1))).start()
    with pytest.raises(Exited):
        ending.end_run(
            exchange=MemoryExchange(shared),
            rank=0,
            world_size=2,
            main_thread_left=threading.Event(),
            write_logs=lambda _: None,
            before_exit=lambda: None,
        )
    assert events == ["other left", f"exit {ending.EXIT_CODE}"]


def test_nobody_leaves_before_the_logs_are_written(events: list[str]) -> None:
    shared = SharedMemory()

    def write(_: float) -> None:
        events.append("written")

    def end(rank: int) -> None:
        with suppress(Exited):
            ending.end_run(
                exchange=MemoryExchange(shared),
                rank=rank,
                world_size=2,
                main_thread_left=threading.Event(),
                write_logs=write if rank == 0 else lambda _: None,
                logging_ranks=[0],
                before_exit=lambda: events.append(f"rank {rank} leaves"),
            )

    late = threading.Timer(0.1, end, args=(0,))
    late.start()
    end(1)
    late.join()
    assert events[:2] == ["written", "rank 1 leaves"]


def test_a_rank_that_does_not_write_its_logs_is_not_waited_for_long(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_LOGS_S", 0.1)
    with pytest.raises(Exited):
        ending.end_run(
            exchange=MemoryExchange(),
            rank=1,
            world_size=2,
            main_thread_left=threading.Event(),
            write_logs=lambda _: None,
            logging_ranks=[0],
            before_exit=lambda: None,
        )
    assert events == [f"exit {ending.EXIT_CODE}"]


def test_a_child_that_cannot_be_killed_is_no_reason_to_stay(events: list[str]) -> None:
    def kill() -> None:
        raise PermissionError("not yours")

    with pytest.raises(Exited):
        end(kill=kill)
    assert events == [f"exit {ending.EXIT_CODE}"]


@pytest.mark.parametrize(
    ("error", "is_communication"),
    [
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistNetworkError("Connection reset by peer"), True),
        (dist.DistStoreError("wait timeout after 12000ms, keys: /0//"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31886. GLHF!"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (ValueError("Connection closed by peer"), False),
        (BrokenPipeError("Broken pipe"), False),
    ],
)
def test_what_only_says_that_a_collective_failed_is_told_from_a_cause(error: Exception, is_communication: bool) -> None:
    assert _torch.is_communication_error(error) is is_communication


def test_a_process_that_cannot_end_itself_is_killed_and_one_that_has_its_number_is_not() -> None:
    frozen = subprocess.Popen(["sleep", "60"])
    os.kill(frozen.pid, signal.SIGSTOP)
    started = psutil.Process(frozen.pid).create_time()
    said: list[str] = []
    card = Card(rank=3, host="node", pid=frozen.pid, started=started)
    ending.end_frozen([replace(card, started=started - 60), replace(card, pid=(1 << 22) + 1)], said.append)
    assert frozen.poll() is None
    ending.end_frozen([card], said.append)
    assert frozen.wait(20) == -signal.SIGKILL
    assert said == [f"rank 3 cannot end itself: its process {frozen.pid} is killed"]
