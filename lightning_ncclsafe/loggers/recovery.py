"""Delivers what a process that has ended left in local staging."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
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


@dataclass(slots=True, kw_only=True)
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
    manifest = read_manifest(folder)
    done = Recovered(folder=folder, manifest=manifest)
    to = manifest.destination if manifest.kind == "files" else manifest.root or str(folder.parent)
    try:
        with Claim(folder) as claim:
            # A lock that a living process has lost means nothing; one that it has given up does.
            lives = claim.is_new and is_alive(manifest)
            # Without a manifest, another process has just recovered it.
            if claim.is_mine and not lives and (folder / MANIFEST).is_file():
                _deliver(done, to, replay)
                return done
            if claim.is_mine:
                claim.remove_lock()
    except Exception as error:
        if replay is not None and not isinstance(error, (OSError, StagingError)):
            raise
        done.problem = str(error) if isinstance(error, StagingError) else f"{to}: {error!r}"
        return done
    done.is_busy = True
    done.problem = f"process {manifest.pid} on {manifest.host} still writes there, or another recovery is working on it"
    if not folder.exists():
        done.problem = "it is gone: another recovery has just delivered it, or somebody has removed it"
    return done


def _deliver(done: Recovered, to: str, replay: Replay | None) -> None:
    """Delivers the content of a claimed folder, and notes in ``done`` what has become of it so far."""
    _check_staging(done.folder)
    try:
        store = Store(done.folder)
    except (TypeError, ValueError, OverflowError) as error:
        raise StagingError(f"{done.folder} is damaged: {error}") from error
    done.to = to if replay is None else done.manifest.identity
    deliver = replay or _to_files(done, to, store)
    while (portion := _read(store, done, replay)) is not None:
        for frame in portion.frames:
            if frame.kind not in KINDS[done.manifest.kind]:
                raise StagingError(f"{done.folder} is damaged: a frame is of kind {frame.kind!r:.50}")
        deliver(portion.frames)
        store.release(portion)
        for frame in portion.frames:
            is_lost = frame.kind == "call" and not frame.body
            done.points += frame.points
            done.records += 0 if is_lost else frame.records
            done.lost_calls += is_lost
    store.close()


def _read(store: Store, done: Recovered, replay: Replay | None) -> Portion | None:
    staged = store.pending_bytes
    # A call cannot be looked up afterwards, as a file can, so each is released at once.
    portion = store.read(1) if replay is not None else store.read()
    done.lost_bytes += staged - store.pending_bytes
    return portion


def _to_files(done: Recovered, to: str, store: Store) -> Replay:
    """Writes frames to files; calls to files of our own, whose names are noted in ``done``."""
    manifest = done.manifest
    _check_is_there(to, manifest.root)
    sink = FilesSink(open_destination(to), store.anchors, store.note)
    if manifest.kind == "files":
        return sink.deliver
    name, written = _file_name(manifest), set[str]()

    def write_down(frames: Sequence[StagedFrame]) -> None:
        lines = [_written_down(frame, name) for frame in frames]
        sink.deliver(lines)
        written.update(line.file for line in lines)
        done.to = " and ".join(f"{to.rstrip('/')}/{file}" for file in sorted(written))

    return write_down


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
