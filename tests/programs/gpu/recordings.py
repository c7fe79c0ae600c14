"""Recordings of real Flight Recorders: a scene's dumps of all ranks in one file, with what they are known to show.

``SCENE-RANKS.json.gz`` holds ``schema``, ``scene``, ``backend``, ``ranks``, ``versions``, ``expected`` and ``dumps``:
for each rank its recorder as JSON and as pickle (base64), and the members of its groups. Nothing in it names a host, a
user or a path.
"""

import base64
import getpass
import gzip
import json
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recordings")
SCHEMA = 1
MOST_BYTES = 100_000
"""Of one file. A scene has some hundred entries for each rank."""

# Of no use, and unlike on every host.
_LEFT_OUT = ("nccl_comm_state",)
_LEFT_OUT_OF_ENTRIES = ("frames", "thread_id", "thread_name")
# Shorter ones, "vm" or "root", occur by chance.
_TELLING = 5

Recording = dict[str, Any]


def make(scene: str, told: list[dict[str, Any]]) -> Recording:
    """A recording, from what each rank has told.

    Args:
        scene: Its name.
        told: By rank: ``truth``, ``dump`` and ``versions``.

    Raises:
        ValueError: It would name the host, the user or a path; the message says which.
    """
    made = {
        "schema": SCHEMA,
        "scene": scene,
        "backend": _backend(told[0]["dump"]["json"]),
        "ranks": len(told),
        "versions": told[0]["versions"],
        "expected": _expected([rank["truth"] for rank in told]),
        "dumps": [_plain(rank["dump"]) for rank in told],
    }
    _check(made)
    return made


def write(recording: Recording, folder: Path) -> Path:
    """Writes it to its file in a folder; returns that.

    Raises:
        ValueError: It is larger than :data:`MOST_BYTES`.
    """
    packed = pack(recording)
    path = folder / f"{recording['scene']}-{recording['ranks']}.json.gz"
    if len(packed) > MOST_BYTES:
        raise ValueError(f"{path.name} has {len(packed):,} bytes, {MOST_BYTES:,} are allowed: make the scene shorter.")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    return path


def pack(recording: Recording) -> bytes:
    """The content of its file, without the time of day: equal recordings are equal files."""
    return gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0)


def read(path: Path) -> Recording:
    """Reads a file.

    Raises:
        ValueError: It is of another schema.
    """
    recording: Recording = json.loads(gzip.decompress(path.read_bytes()))
    if recording.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has schema {recording.get('schema')!r}, known is {SCHEMA}: record it again.")
    return recording


def files(folder: Path = FOLDER) -> list[Path]:
    """All recordings in a folder."""
    return sorted(folder.glob("*.json.gz"))


def _backend(dump: dict[str, Any]) -> str:
    names = [str(entry["profiling_name"]) for entry in dump.get("entries", [])]
    return names[0].partition(":")[0] if names else ""


def _expected(truths: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks know alike; but how late a rank was, that one has measured."""
    expected = dict(truths[0])
    if "late_rank" in expected:
        expected["late_ms"] = truths[expected["late_rank"]]["late_ms"]
    return expected


def _plain(dump: dict[str, Any]) -> dict[str, Any]:
    recorder = {name: value for name, value in dump["json"].items() if name not in _LEFT_OUT}
    recorder["entries"] = [
        {name: value for name, value in entry.items() if name not in _LEFT_OUT_OF_ENTRIES}
        for entry in recorder.get("entries", [])
    ]
    return dump | {"json": recorder}


def _check(recording: Recording) -> None:
    pickles = [base64.b64decode(dump["pickle"]) for dump in recording["dumps"]]
    plain = json.dumps(recording | {"dumps": [dump | {"pickle": ""} for dump in recording["dumps"]]}).encode()
    for word in private_words():
        if any(word.encode() in text for text in (plain, *pickles)):
            raise ValueError(f"The recording of {recording['scene']} has {word!r} in it, which is this host's own.")


def private_words() -> list[str]:
    """What belongs to this host and its user alone."""
    words = [socket.gethostname(), str(Path.home()), str(Path.cwd()), sys.prefix]
    with suppress(OSError, KeyError):  # a number without a name, in a container
        words.append(getpass.getuser())
    return [word for word in words if len(word) >= _TELLING]
