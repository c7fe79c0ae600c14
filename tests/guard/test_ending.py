"""Ending a run: the process exits after the report, in time, and nothing passes the gate meanwhile."""

import os
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from warm import Warm

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import DirectoryExchange, MemoryExchange, SharedMemory
from lightning_ncclsafe.guard import ending
from lightning_ncclsafe.guard.ending import EXIT_CODE, Ending
from lightning_ncclsafe.probes.rank_info import RankInfo


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
    return happened


def make_error() -> CollectiveTimeoutError:
    return CollectiveTimeoutError("rank 1 is in a slow evaluation")


def end(
    *,
    rank: int = 1,
    exchange: MemoryExchange | DirectoryExchange | None = None,
    write_logs: Callable[[float], None] = lambda _: None,
    logging_ranks: tuple[int, ...] = (),
    kill: Callable[[], None] = lambda: None,
    may_others_come: Callable[[], bool] = lambda: False,
) -> None:
    """Of an ending that knows no Trainer, so that this process is not held and has no deadline."""
    ending.end_run(
        ending=Ending(),
        exchange=exchange or MemoryExchange(),
        rank=rank,
        world_size=2,
        write_logs=write_logs,
        logging_ranks=logging_ranks,
        before_exit=kill,
        may_others_come=may_others_come,
    )


def test_the_process_exits_and_ends_what_it_launched(events: list[str]) -> None:
    with pytest.raises(Exited):
        end(kill=lambda: events.append("killed"))
    assert events == ["killed", f"exit {EXIT_CODE}"]


def test_no_files_are_left_once_all_have_come_or_are_killed(events: list[str], tmp_path: Path) -> None:
    coming = [True, True, True, False]
    with pytest.raises(Exited):
        end(
            exchange=DirectoryExchange(tmp_path / "files"),
            kill=lambda: events.append(f"{len(coming)} to come"),
            may_others_come=lambda: coming.pop(0) if len(coming) > 1 else coming[0],
        )
    assert events == ["4 to come", f"exit {EXIT_CODE}"]
    assert not (tmp_path / "files").exists()


def test_files_stay_for_a_rank_that_is_on_its_way(
    events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_LAST_STEP_S", 0.2)
    with pytest.raises(Exited):
        end(exchange=DirectoryExchange(tmp_path / "files"), may_others_come=lambda: True)
    assert [*DirectoryExchange(tmp_path / "files").get_many(["left/1"])] == ["left/1"]


def test_the_host_of_the_store_leaves_last(events: list[str]) -> None:
    shared = SharedMemory()
    threading.Timer(0.1, lambda: (events.append("other left"), ending.say_goodbye(MemoryExchange(shared), 1))).start()
    with pytest.raises(Exited):
        end(rank=0, exchange=MemoryExchange(shared))
    assert events == ["other left", f"exit {EXIT_CODE}"]


def test_nobody_leaves_before_the_logs_are_written(events: list[str]) -> None:
    shared = SharedMemory()
    needed_no_more: list[bool] = []

    def write(_: float) -> None:
        events.append("written")

    def leave(rank: int) -> None:
        with suppress(Exited):
            end(
                rank=rank,
                exchange=MemoryExchange(shared),
                write_logs=write if rank == 0 else lambda _: None,
                logging_ranks=(0,),
                kill=lambda: go(rank),
            )

    def go(rank: int) -> None:
        events.append(f"rank {rank} leaves")
        if rank == 0:
            needed_no_more.append("left/1" in MemoryExchange(shared).get_many(["left/1"]))

    late = threading.Timer(0.1, leave, args=(0,))
    late.start()
    leave(1)
    late.join()
    assert events[0] == "written"
    assert {"rank 0 leaves", "rank 1 leaves"} <= {*events[1:]}
    # The host of the store leaves once the other has said that it needs it no more.
    assert needed_no_more == [True]


def test_a_rank_that_does_not_write_its_logs_is_not_waited_for_long(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_LOGS_S", 0.1)
    with pytest.raises(Exited):
        end(logging_ranks=(0,))
    assert events == [f"exit {EXIT_CODE}"]


def test_a_child_that_cannot_be_killed_is_no_reason_to_stay(events: list[str]) -> None:
    def kill() -> None:
        raise PermissionError("not yours")

    with pytest.raises(Exited):
        end(kill=kill)
    assert events == [f"exit {EXIT_CODE}"]


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
def test_a_message_that_a_collective_failed_is_not_taken_for_a_cause(error: Exception, is_communication: bool) -> None:
    assert process_groups.is_communication_error(error) is is_communication


def test_a_process_that_cannot_end_itself_is_killed_and_one_that_has_its_number_is_not() -> None:
    frozen = subprocess.Popen(["sleep", "60"])
    os.kill(frozen.pid, signal.SIGSTOP)
    started = psutil.Process(frozen.pid).create_time()
    said: list[str] = []
    peer = RankInfo(rank=3, host="node", pid=frozen.pid, started=started)
    ending.end_frozen([replace(peer, started=started - 60), replace(peer, pid=(1 << 22) + 1)], said.append)
    assert frozen.poll() is None
    ending.end_frozen([peer], said.append)
    assert frozen.wait(20) == -signal.SIGKILL
    assert said == [f"rank 3 cannot end itself; its process {frozen.pid} was killed"]


def test_a_checkpoint_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    run, path = Ending(), tmp_path / "last.ckpt"
    path.write_text("old")
    with run.written(path) as beside:
        Path(beside).write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(ValueError, match="disk"), run.written(path) as beside:
        Path(beside).write_text("half")
        raise ValueError("disk")
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("new", [path])


def test_where_nothing_was_written_nothing_is_raised_and_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("before")
    with Ending().written(path):
        pass
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_a_checkpoint_that_was_begun_before_the_end_does_not_get_its_name(tmp_path: Path) -> None:
    run, path = Ending(), tmp_path / "last.ckpt"
    path.write_text("old")
    with pytest.raises(CollectiveTimeoutError), run.written(path) as beside:
        Path(beside).write_text("new")
        run.close(make_error)
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("old", [path])


def test_what_is_no_local_file_is_written_where_it_belongs(tmp_path: Path) -> None:
    """A bucket puts an object there whole; a folder is written by many ranks; a device is not to be replaced."""
    run = Ending()
    for path in ("s3://bucket/last.ckpt", str(tmp_path), os.devnull):
        with run.written(path) as there:
            assert there == path
    with pytest.raises(CollectiveTimeoutError), run.written("s3://bucket/last.ckpt"):
        run.close(make_error)
    with pytest.raises(CollectiveTimeoutError), run.written("s3://bucket/last.ckpt"):
        pytest.fail("nothing is written any more")


def exit_of(warm: Warm, folder: Path, script: str, *, within_s: float) -> int:
    """The exit status of a process in which a run is being ended."""
    start = """
        import atexit, itertools, sys, threading, time
        from lightning_ncclsafe.guard import ending
        from lightning_ncclsafe.errors import CollectiveTimeoutError
        run = ending.Ending()
        run.note_thread()
        ending._EXITS_S = 0.5
        never = threading.Event()
    """
    began = time.monotonic()
    program = folder / "program.py"
    program.write_text(textwrap.dedent(start) + textwrap.dedent(script))
    (code,), output = warm.run([str(program)], folder, timeout_s=40)
    assert time.monotonic() - began < within_s, output
    return code


LATE = {
    "the interpreter's lock is held": "run.exit_within(0.5); sum(itertools.repeat(1, 10**12))",
    "the main thread waits": "run.exit_within(0.5); never.wait()",
    "a deadline is not put off": "run.exit_within(0.5); run.exit_within(60); never.wait()",
    "a handler of atexit waits": "atexit.register(never.wait); run.exit_after_main_thread()",
    "a handler made later waits": "run.exit_after_main_thread(); atexit.register(never.wait)",
    "another thread waits": "threading.Thread(target=never.wait).start(); run.exit_after_main_thread()",
    "a destructor waits": """
        class Communicator:
            def __del__(self, sleep=time.sleep):
                sleep(60)
        sys.kept = Communicator()
        run.exit_after_main_thread()
    """,
    "a destructor holds the lock": """
        class Communicator:
            def __del__(self, endless=itertools.repeat(1, 10**12), sum=sum):
                sum(endless)
        sys.kept = Communicator()
        run.exit_after_main_thread()
    """,
}


@pytest.mark.parametrize("script", LATE.values(), ids=LATE)
def test_a_process_that_does_not_end_by_itself_is_ended(script: str, warm: Warm, tmp_path: Path) -> None:
    assert exit_of(warm, tmp_path, script, within_s=30) == EXIT_CODE


@pytest.mark.parametrize(
    "script",
    [
        "ending._EXITS_S = 20; run.exit_after_main_thread(); raise SystemExit(3)",
        "run.exit_within(0.5); run.lift_deadline(); time.sleep(1); raise SystemExit(3)",
    ],
    ids=["after its main thread", "after it went on"],
)
def test_a_process_that_ends_by_itself_has_its_own_status(script: str, warm: Warm, tmp_path: Path) -> None:
    assert exit_of(warm, tmp_path, script, within_s=30) == 3


def test_without_the_timer_of_the_system_a_thread_keeps_the_time(warm: Warm, tmp_path: Path) -> None:
    script = "ending.sys.platform = 'darwin'; run.exit_within(0.5); never.wait()"
    assert exit_of(warm, tmp_path, script, within_s=30) == EXIT_CODE
