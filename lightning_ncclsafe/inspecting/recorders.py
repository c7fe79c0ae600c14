"""Reads the Flight Recorder of processes that offer access to it: through a worker server's socket, or a pipe.

Through the socket, the process answers and leaves nothing behind. Through the pipe, it writes the file that its
environment names, so the user has to ask for that.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_ncclsafe.exchange import wait_for
from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.facts.wording import capitalised, ranks_words
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.inspecting.sources import folder_of
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.reading.dumps import from_json, from_pickle, is_dump
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.reading.values import ReadingError

_SOCKET, _PIPE = "TORCH_WORKER_SERVER_SOCKET", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
# The first one that is set counts. If none is, the default depends on PyTorch's version.
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT, _OLD_DEFAULT = "torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"
# NCCL's own recorder comes before gloo's.
_HANDLERS = (("dump_nccl_trace_json", from_json), ("dump_nccl_trace_pickle", from_pickle), ("fr_trace_json", from_json))
_ANSWER_S = 2.0
# PyTorch reads its pipe once a second.
_WRITTEN_S = 6.0
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The answers of Flight Recorders.

    Attributes:
        facts: Groups and collectives of ranks, by process id.
        notes: What could not be read, one line each.
    """

    facts: Mapping[int, RankFacts] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _CannotAskError(Exception):
    """A Flight Recorder cannot be read; the message says why."""


def recorded(ranks: Iterable[RankProcess], pool: Executor, *, may_write: bool) -> Recorded:
    """Reads the Flight Recorders of ranks.

    Args:
        may_write: Whether ranks may be made to write a file.
    """
    answers = [*zip(given := [*ranks], pool.map(partial(_answer, may_write=may_write), given), strict=True)]
    facts: dict[int, RankFacts] = {}
    for _, of_job in groupby(sorted(answers, key=lambda one: one[0].job), key=lambda one: one[0].job):
        artifacts, pids = Artifacts(), {}
        for one, dump in of_job:
            if isinstance(dump, dict):
                artifacts.add_dump(f"rank_{one.rank}", dump)
                pids[one.rank] = one.pid
        job = artifacts.job()
        # A recorder that is off is empty.
        active = (one for one in job.ranks if one.record is None or not one.record.is_empty) if job else ()
        facts |= {pids[one.rank]: one for one in active if one.rank in pids}
    said = sorted((str(why), one.rank) for one, why in answers if isinstance(why, _CannotAskError))
    notes = (
        f"{capitalised(ranks_words([rank for _, rank in alike]))}: {why}"
        for why, alike in groupby(said, key=lambda each: each[0])
    )
    return Recorded(facts=facts, notes=tuple(notes))


def _answer(one: RankProcess, *, may_write: bool) -> dict[Any, Any] | _CannotAskError | None:
    try:
        if one.environment.get(_SOCKET):
            return _from_server(one, _path(one, one.environment[_SOCKET]))
        if one.environment.get(_PIPE):
            return _through_pipe(one, _path(one, f"{one.environment[_PIPE]}{one.rank}.pipe"), may_write=may_write)
    except _CannotAskError as error:
        return error
    except (OSError, HTTPException, ReadingError) as error:
        return _CannotAskError(f"its Flight Recorder did not answer ({str(error) or type(error).__name__})")
    return None


def _path(one: RankProcess, name: str) -> Path:
    """A path of the rank, which may be in a container and has its own working folder, as this process sees it."""
    return Path(f"/proc/{one.pid}/root{os.path.join(folder_of(one.pid) or '/', name)}")


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path, self._pid = path, pid

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
        listens, _, _ = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if listens != self._pid:
            raise _CannotAskError(f"the socket of its worker server belongs to process {listens}")


def _from_server(one: RankProcess, path: Path) -> dict[Any, Any]:
    names = _asked(one, path, "GET", "/handler/")
    for name, read in _HANDLERS:
        if name.encode() in names:
            plain = read(_asked(one, path, "POST", f"/handler/{name}"))
            if isinstance(plain, dict) and is_dump(plain) and (plain.get("entries") or plain.get("pg_status")):
                return plain
    raise _CannotAskError("its worker server has no active Flight Recorder (TORCH_FR_BUFFER_SIZE)")


def _asked(one: RankProcess, path: Path, method: str, handler: str) -> bytes:
    connection = _UnixConnection(path, one.pid)
    try:
        connection.request(method, handler)
        answer = connection.getresponse()
        content = answer.read(_MOST_BYTES)
    finally:
        connection.close()
    if answer.status != 200:
        raise _CannotAskError(f"its worker server answers {answer.status} to {handler}")
    return content


def _through_pipe(one: RankProcess, pipe: Path, *, may_write: bool) -> dict[Any, Any]:
    if not stat.S_ISFIFO(pipe.stat().st_mode):
        raise _CannotAskError("the pipe of its Flight Recorder is not a pipe")
    if not may_write:
        raise _CannotAskError("it would dump its Flight Recorder to a file with --recorder")
    files = [*_destinations(one)]
    before = {file: _written_ns(file) for file in files}
    # Without O_NONBLOCK, this waits until there is a reader.
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)

    def written() -> dict[Any, Any] | None:
        changed = (file for file in files if _written_ns(file) != before[file])
        return next(filter(None, (or_none(partial(_in_file, file)) for file in changed)), None)

    if dump := wait_for(written, deadline_s=_WRITTEN_S):
        return dump
    where = " or ".join(str(file).removeprefix(f"/proc/{one.pid}/root") for file in files)
    raise _CannotAskError(f"its Flight Recorder was asked through its pipe, but has not written {where}")


def _destinations(one: RankProcess) -> Iterator[Path]:
    named = next((one.environment[name] for name in _PREFIXES if one.environment.get(name)), None)
    if named is not None:
        yield _path(one, f"{named}{one.rank}")
        return
    cache = one.environment.get("XDG_CACHE_HOME") or os.path.join(one.environment.get("HOME", "/tmp"), ".cache")
    yield _path(one, f"{os.path.join(cache, _DEFAULT)}{one.rank}")
    yield _path(one, f"{_OLD_DEFAULT}{one.rank}")


def _written_ns(file: Path) -> int:
    return or_none(lambda: file.stat().st_mtime_ns) or 0


def _in_file(file: Path) -> dict[Any, Any]:
    """The dump in a file; a file that is not complete yet is not a pickle."""
    with file.open("rb") as stream:
        return from_pickle(stream.read(_MOST_BYTES))
