"""Delivers what a process that has ended left in local staging."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_ncclsafe.loggers.destinations import open_destination
from lightning_ncclsafe.loggers.files import FilesSink
from lightning_ncclsafe.loggers.segments import Portion, StagedFrame
from lightning_ncclsafe.loggers.staging import (
    KINDS,
    MANIFEST,
    Claim,
    Manifest,
    StagingError,
    is_alive,
    open_regular,
    read_manifest,
)
from lightning_ncclsafe.loggers.store import Store

Replay = Callable[[Sequence[StagedFrame]], None]
"""Makes calls of the logger they were meant for."""

# More than a note of what is delivered needs.
_PROBE_BYTES = 1 << 16
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What became of a folder of local staging.

    Attributes:
        folder: The folder.
        manifest: Its manifest.
        points: Points delivered.
        records: Everything else delivered.
        to: Where they are now.
        problem: Why something may still be in the folder; empty if nothing is.
        is_busy: Whether that is only because another process works on it.
        lost_bytes: Bytes of the folder that could not be read.
        lost_calls: Calls of which only the name was staged, as their arguments were in the memory of the process.
    """

    folder: Path
    manifest: Manifest
    points: int = 0
    records: int = 0
    to: str = ""
    problem: str = ""
    is_busy: bool = False
    lost_bytes: int = 0
    lost_calls: int = 0


def recover(folder: Path, replay: Replay | None = None) -> Recovered:
    """Delivers the content of a folder, and removes the folder when all of it is on storage.

    It may be stopped at any time and begun again: what is on storage by then is not written again, and at most one of
    the calls that ``replay`` makes is made twice.

    Args:
        replay: Makes calls of the logger they were meant for. None: they are written to files next to its logs.

    Raises:
        StagingError: If the folder is not local staging.
        Exception: What ``replay`` raises, except an OSError, which is a problem of its storage.
    """
    recovery = _Recovery(folder, read_manifest(folder), replay)
    try:
        with _claimed(folder) as claim:
            # A lock that a living process has lost means nothing; one that it has given up does.
            lives = claim.is_new and is_alive(recovery.done.manifest)
            # Without a manifest, another process has just recovered it.
            if claim.is_mine and not lives and (folder / MANIFEST).is_file():
                recovery.run()
                return recovery.done
            if claim.is_mine:
                claim.remove_lock()
    except Exception as error:
        if replay is not None and not isinstance(error, (OSError, StagingError)):
            raise
        is_staging_wrong = isinstance(error, StagingError)
        return replace(recovery.done, problem=str(error) if is_staging_wrong else f"{recovery.to}: {error!r}")
    pid, host = recovery.done.manifest.pid, recovery.done.manifest.host
    problem = f"process {pid} on {host} still writes there, or another recovery is working on it"
    if not folder.exists():
        problem = "it is gone: another recovery has just delivered it, or somebody has removed it"
    return replace(recovery.done, is_busy=True, problem=problem)


class _Recovery:
    """Delivers the content of one folder.

    Attributes:
        done: What has become of it so far.
        to: Where it goes.
    """

    def __init__(self, folder: Path, manifest: Manifest, replay: Replay | None) -> None:
        self.done = Recovered(folder=folder, manifest=manifest)
        self.to = manifest.destination if manifest.kind == "files" else manifest.root or str(folder.parent)
        self._replay = replay
        self._written: set[str] = set()

    def run(self) -> None:
        """Delivers everything; the folder is claimed."""
        folder = self.done.folder
        _check_staging(folder)
        try:
            store = Store(folder)
        except (TypeError, ValueError, OverflowError) as error:
            raise StagingError(f"{folder} is damaged: {error}") from error
        deliver = self._replay or self._to_files(store)
        kinds = KINDS[self.done.manifest.kind]
        while (portion := self._read(store)) is not None:
            for frame in portion.frames:
                if frame.kind not in kinds:
                    raise StagingError(f"{folder} is damaged: a frame is of kind {frame.kind!r:.50}")
            deliver(portion.frames)
            store.release(portion)
            self._count(portion.frames)
        store.close()
        self.done = replace(self.done, to=self._where())

    def _read(self, store: Store) -> Portion | None:
        staged = store.pending_bytes
        # A call cannot be looked up afterwards, as a file can, so each is released at once.
        portion = store.read(1) if self._replay is not None else store.read()
        self.done = replace(self.done, lost_bytes=self.done.lost_bytes + staged - store.pending_bytes)
        return portion

    def _count(self, frames: Sequence[StagedFrame]) -> None:
        lost = [frame for frame in frames if frame.kind == "call" and not frame.body]
        self.done = replace(
            self.done,
            points=self.done.points + sum(frame.points for frame in frames),
            records=self.done.records + sum(frame.records for frame in frames) - sum(frame.records for frame in lost),
            lost_calls=self.done.lost_calls + len(lost),
        )

    def _to_files(self, store: Store) -> Replay:
        manifest = self.done.manifest
        _check_is_there(self.to, manifest.root)
        sink = FilesSink(open_destination(self.to), store.anchors, store.note)
        if manifest.kind == "files":
            return sink.deliver
        name = _file_name(manifest)

        def write_down(frames: Sequence[StagedFrame]) -> None:
            written = [_written_down(frame, name) for frame in frames]
            self._written.update(frame.file for frame in written)
            sink.deliver(written)

        return write_down

    def _where(self) -> str:
        manifest = self.done.manifest
        if manifest.kind == "calls" and self._replay is not None:
            return manifest.identity
        return " and ".join(f"{self.to.rstrip('/')}/{file}" for file in sorted(self._written)) or self.to


def _written_down(frame: StagedFrame, name: str) -> StagedFrame:
    """A call as a line of a file: points as a row of CSV, anything else as a line of JSON, as staged."""
    call: Any = None
    with suppress(ValueError, RecursionError):
        call = json.loads(frame.body)
    call = call if isinstance(call, dict) else {"text": frame.body.decode(errors="replace")}
    values = call.get("values")
    # A metric with the name of one of our columns would take its place.
    if isinstance(values, dict) and not values.keys() & {"step", "time"}:
        row = {**values, "step": call.get("step"), "time": call.get("created")}
        return replace(frame, kind="rows", file=f"{name}.csv", body=json.dumps(row).encode())
    if not frame.body:
        call = {"lost": "its arguments were only in the memory of the process"}
    line = json.dumps({**call, "call": frame.file}).encode()
    return replace(frame, kind="append", file=f"{name}.jsonl", body=line + b"\n")


def _file_name(manifest: Manifest) -> str:
    """A readable name, the same whenever this staging is recovered: which run, and when it began."""
    began = datetime.fromtimestamp(manifest.created_ns // 1_000_000_000, tz=timezone.utc)
    run = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{manifest.logger}-{manifest.identity}").strip("-.")[:_LONGEST_NAME]
    # The nanoseconds distinguish loggers that began together.
    return f"recovered-{run}-{began:%Y-%m-%dT%H-%M-%S}.{manifest.created_ns % 1_000_000_000:09d}Z-{manifest.pid}"


def _check_staging(folder: Path) -> None:
    """A recovery notes how far it is; if it cannot, the next one would write things twice."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
        # The store counts what it cannot open as lost.
        for path in folder.glob("*.frames"):
            open(path, "rb", opener=open_regular).close()
    except OSError as error:
        raise StagingError(f"{folder} must be readable and writable for a recovery: {error}") from error


def _check_is_there(to: str, root: str) -> None:
    """What is written below an unmounted mount point would never be seen again."""
    if "://" not in to and not any(map(os.path.isdir, (to, root))):
        raise StagingError(
            f"{root or to} does not exist; if it is a mount point, mount it, otherwise create it: mkdir -p"
        )


@contextmanager
def _claimed(folder: Path) -> Iterator[Claim]:
    claim = Claim(folder)
    try:
        yield claim
    finally:
        claim.give_up()
