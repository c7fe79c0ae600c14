"""Flight Recorders that may be asked: through the socket of a worker server, and through a pipe."""

import json
import os
import pickle
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from polling import until
from torch._C import _distributed_c10d
from warm import Warm, ranks_of

from lightning_ncclsafe.inspecting import recorders
from lightning_ncclsafe.inspecting.inspection import inspect
from lightning_ncclsafe.inspecting.ranks import RankProcess, SeenProcess
from lightning_ncclsafe.inspecting.recorders import Recorded, recorded

ENTRY = {
    "collective_seq_id": 2,
    "process_group": ["0", "default_pg"],
    "pg_id": 0,
    "profiling_name": "nccl:all_reduce",
    "state": "started",
    "retired": False,
    "input_sizes": [[3]],
    "input_dtypes": ["Float"],
    "output_sizes": [[3]],
    "output_dtypes": ["Float"],
    "time_created_ns": 5,
    "is_p2p": False,
    "timeout_ms": 1000,
    "record_id": 1,
}
DUMP = {
    "version": "2.10",
    "entries": [ENTRY],
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": 2, "last_started_collective": 2, "last_completed_collective": 1}},
}
EMPTY = {"version": "2.10", "entries": [], "pg_config": {}, "pg_status": {}}


class Evil:
    """What a pickle may do if it is loaded by anybody who trusts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/evil",)


@contextmanager
def serving(path: Path, answers: Mapping[str, bytes], silent: threading.Event | None = None) -> Iterator[list[str]]:
    """A worker server in this process; with `silent` it answers nothing until that is set."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "local"

        def log_message(self, *words: object) -> None:
            pass

        def _answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            if silent is not None:
                silent.wait(10)
            names = json.dumps([*answers]).encode()
            content = names if self.path == "/handler/" else answers.get(self.path.rpartition("/")[2])
            self.send_response(200 if content is not None else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        do_GET = do_POST = _answer

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield asked
        finally:
            if silent is not None:
                silent.set()
            server.shutdown()
            thread.join(10)


def asked_of(*ranks: RankProcess, may_write: bool = False) -> Recorded:
    with ThreadPoolExecutor(2) as pool:
        return recorded(ranks, pool, may_write=may_write)


def rank(pid: int | None = None, **environment: str) -> RankProcess:
    return RankProcess(pid=os.getpid() if pid is None else pid, rank=0, world_size=2, environment=environment)


def waits_in(found: Recorded) -> list[tuple[str, int]]:
    return [(call.op, call.seq) for facts in found.facts.values() for call in facts.collectives if not call.completed]


@pytest.mark.parametrize(
    "answers",
    [
        {"ping": b"", "fr_trace_json": json.dumps(DUMP).encode()},
        {"dump_nccl_trace_pickle": pickle.dumps(DUMP), "fr_trace_json": json.dumps(EMPTY).encode()},
        {"dump_nccl_trace_json": json.dumps(EMPTY).encode(), "fr_trace_json": json.dumps(DUMP).encode()},
    ],
    ids=["gloo", "nccl", "nccl is off"],
)
def test_a_worker_server_returns_its_recorder(answers: dict[str, bytes], tmp_path: Path) -> None:
    with serving(tmp_path / "0.sock", answers):
        found = asked_of(rank(TORCH_WORKER_SERVER_SOCKET=str(tmp_path / "0.sock")))
    assert (waits_in(found), found.notes) == ([("all_reduce", 2)], ())
    (facts,) = found.facts.values()
    assert [(group.ranks, group.last_enqueued, group.last_completed) for group in facts.groups] == [((0, 1), 2, 1)]


def test_unexpected_answers_are_reported_and_run_no_code(tmp_path: Path) -> None:
    one = rank(TORCH_WORKER_SERVER_SOCKET=str(tmp_path / "0.sock"))
    Path("/tmp/evil").unlink(missing_ok=True)
    for answer, words in (
        ({"dump_nccl_trace_pickle": pickle.dumps(Evil())}, "Rank 0: its Flight Recorder did not answer"),
        ({"fr_trace_json": b"[1"}, "damaged or was cut off"),
        ({"fr_trace_json": json.dumps(EMPTY).encode()}, "no active Flight Recorder"),
        ({"ping": b""}, "no active Flight Recorder"),
    ):
        with serving(tmp_path / "0.sock", answer):
            found = asked_of(one)
        (tmp_path / "0.sock").unlink()
        assert found.facts == {} and len(found.notes) == 1 and words in found.notes[0], found.notes
    assert not Path("/tmp/evil").exists()
    assert "did not answer" in asked_of(one).notes[0]


def test_a_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_ANSWER_S", 0.2)
    with serving(tmp_path / "0.sock", {}, silent=threading.Event()):
        found = asked_of(rank(TORCH_WORKER_SERVER_SOCKET=str(tmp_path / "0.sock")))
    assert found.facts == {} and "timed out" in found.notes[0]


def test_a_socket_of_another_process_is_not_used(tmp_path: Path) -> None:
    """If all ranks were given one socket name, only one of them owns it."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            with serving(tmp_path / "0.sock", {"fr_trace_json": json.dumps(DUMP).encode()}) as asked:
                found = asked_of(rank(other.pid, TORCH_WORKER_SERVER_SOCKET=str(tmp_path / "0.sock")))
        finally:
            other.communicate(b"\n", timeout=10)
    assert (found.facts, asked) == ({}, [])
    assert f"the socket of its worker server belongs to process {os.getpid()}" in found.notes[0]


@contextmanager
def listening(pipe: Path, file: Path, dump: bytes) -> Iterator[list[bytes]]:
    """As PyTorch's monitor does: it reads the pipe, and then writes the file, not all of it at once."""
    os.mkfifo(pipe)
    descriptor, heard, ends = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), [], threading.Event()

    def monitor() -> None:
        while not ends.wait(0.02):
            try:
                words = os.read(descriptor, 128)
            except BlockingIOError:
                continue
            if words:
                heard.append(words)
                with file.open("wb") as stream:
                    stream.write(dump[: len(dump) // 2])
                    stream.flush()
                    ends.wait(0.25)
                    stream.write(dump[len(dump) // 2 :])

    thread = threading.Thread(target=monitor)
    thread.start()
    try:
        yield heard
    finally:
        ends.set()
        thread.join(10)
        os.close(descriptor)


@pytest.mark.parametrize("variable", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "XDG_CACHE_HOME"])
def test_a_dump_requested_by_pipe_is_read_when_complete(variable: str, tmp_path: Path) -> None:
    given = tmp_path if variable == "XDG_CACHE_HOME" else tmp_path / "dump_"
    file = tmp_path / "torch" / "comm_lib_trace_rank_0" if variable == "XDG_CACHE_HOME" else tmp_path / "dump_0"
    file.parent.mkdir(exist_ok=True)
    # Of an earlier incident.
    file.write_bytes(pickle.dumps({**DUMP, "entries": [{**ENTRY, "profiling_name": "nccl:broadcast"}]}))
    environment = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"), variable: str(given)}
    with listening(tmp_path / "pipe_0.pipe", file, pickle.dumps(DUMP)) as heard:
        found = asked_of(rank(**environment), may_write=True)
    assert (waits_in(found), found.notes, len(heard)) == ([("all_reduce", 2)], (), 1)


def test_without_permission_nothing_is_written(tmp_path: Path) -> None:
    environment = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
    }
    with listening(tmp_path / "pipe_0.pipe", tmp_path / "dump_0", pickle.dumps(DUMP)) as heard:
        found = asked_of(rank(**environment))
    assert (found.facts, heard, [*tmp_path.glob("dump_*")]) == ({}, [], [])
    assert found.notes[0].endswith("--recorder")


def test_non_pipes_and_unread_pipes_are_reported(tmp_path: Path) -> None:
    one = rank(TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "pipe_"), TORCH_FR_DUMP_TEMP_FILE=str(tmp_path / "dump_"))
    pipe = tmp_path / "pipe_0.pipe"
    pipe.write_text("mine")
    assert "is not a pipe" in asked_of(one, may_write=True).notes[0]
    assert pipe.read_text() == "mine"
    pipe.unlink()
    os.mkfifo(pipe)
    assert "did not answer" in asked_of(one, may_write=True).notes[0]


def test_a_rank_without_a_server_or_pipe_is_not_asked() -> None:
    assert asked_of(rank()) == Recorded()


PROGRAM = """
    import os, sys, time

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _WorkerServer

    rank, folder = int(os.environ["LOCAL_RANK"]), sys.argv[1]
    server = _WorkerServer(f"{folder}/{rank}.sock")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        open(f"{folder}/begun", "w").close()
        time.sleep(100)
    dist.all_reduce(torch.ones(7))
"""


@pytest.mark.skipif(
    "fr_trace_json" not in _distributed_c10d._get_handler_names(), reason="this PyTorch serves only NCCL's recorder"
)
def test_pytorchs_worker_server_shows_the_pending_collectives(warm: Warm, tmp_path: Path) -> None:
    program, begun = tmp_path / "train.py", tmp_path / "begun"
    program.write_text(dedent(PROGRAM))
    envs = [{**env, "TORCH_FR_BUFFER_SIZE": "100"} for env in ranks_of(2)]
    with (tmp_path / "output").open("wb") as output:
        running = [
            warm.start([str(program), str(tmp_path)], output=output.fileno(), cwd=tmp_path, env={**os.environ, **env})
            for env in envs
        ]
        try:
            until(begun.exists)
            seen = [
                SeenProcess(pid=one.pid, environment={**env, "TORCH_WORKER_SERVER_SOCKET": f"{tmp_path}/{number}.sock"})
                for number, (one, env) in enumerate(zip(running, envs, strict=True))
            ]
            said: list[str] = []
            (diagnosis,) = inspect(
                [one.pid for one in running], looks=3, over_s=1.0, say=said.append, processes=lambda: seen
            ).diagnoses
        finally:
            for one in running:
                one.end_session()
                one.wait(10)
    assert said == []
    assert [
        [(call.op, call.seq) for call in facts.collectives if not call.completed] for facts in diagnosis.job.ranks
    ] == [
        [],
        [("all_reduce", 2)],
    ]
    first = diagnosis.findings[0]
    assert (first.ranks, "sequence number 2" in first.summary) == ((0,), True)
    assert not any("Flight Recorder cannot be read" in text for text in diagnosis.unanswered)
