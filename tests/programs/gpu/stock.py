"""Recordings of what trainings without a guard leave on real NCCL: their log and dumps, with what is true of them.

``without_us.py --gpu --keep FOLDER`` runs faulty trainings with Lightning's own DDPStrategy and keeps what they leave;
this makes recordings of those: ``python tests/programs/gpu/stock.py FOLDER``. ``stock/CASE.json.gz`` holds ``schema``,
``causes``, ``ranks`` and ``place`` as in ``hangs``, ``log`` (the output of all ranks), and ``dumps``, the entries of
each rank's recorder that PyTorch's watchdog has written. Nothing in it names a host, a user or a path of the machine
that it comes from. A run says nothing about a hang, and is left out, if a tensor on the CPU made user code fail, or if
nothing of NCCL's had failed when the run was cut.
"""

import argparse
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import recordings

from lightning_ncclsafe.facts.findings import Finding
from lightning_ncclsafe.reading.dumps import from_pickle, rank_of
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

FOLDER = recordings.FOLDER / "stock"
MOST_BYTES = 12_000
"""Of one file."""

_ROOT = Path(__file__).parents[3]
# Where files of packages and of this project are said to be, whatever the machine.
_PLACES = (
    (r"/[^\s\"':]*/site-packages/", "/venv/site-packages/"),
    (r"/[^\s\"':]*/lib/python3\.\d+/", "/usr/lib/python3/"),
    (r"/[^\s\"':]*/tests/(?=programs/faults/|warm\.py)", "/train/tests/"),
    (r"/tmp/fault-\w+", "/run"),
    (r"/dev/shm/[\w.-]+", "/dev/shm/segment"),
)
_KNOWN = ("/dev/shm/", "/venv/site-packages/", "/usr/lib/python3/", "/train/", "/run", "/pytorch/")
_PATH = re.compile(r"(?<![\w.:/<>-])/(?:[\w.-]+/)+[\w.-]*")
# The reader needs neither C++ frames nor warnings; these are most of a log.
_LEFT_OUT = re.compile(r"(?:\[rank\d+\]: ?)?frame #\d+: |.*(?:UserWarning|_pytree\.py|does not have many workers)")
_CODE = re.compile(r"  \S.*|\[rank\d+\]:     \S.*|\[rank\d+\]: +[\^~]+$")
_OF_A_DUMP = ("version", "entries", "pg_config", "pg_status")
# Read by nothing here, and much of an entry.
_OF_NO_USE = (
    "thread_id",
    "thread_name",
    "duration_ms",
    "output_dtypes",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
)
_MS = 1_000_000
_NOT_COMPARABLE = (
    "No backend type associated with device type cpu",
    "Expected all tensors to be on the same device",
    "needs a strategy of lightning_ncclsafe",
)
_OF_NCCL = ("Watchdog caught collective operation timeout", "raised the following async exception")

_ALONE = ("host-stuck", "silent-rank", "no-dump", "dead-rank")
_APART = ("diverged-collectives", "mismatched-collective", "out-of-step")
_FAILED = ("failed-rank", "worker-died", "gpu-memory-exhausted")
# Which findings on what was left are true of a cause. Nothing that was left shows why a rank is elsewhere.
_KINDS = {
    **dict.fromkeys(("diverged-collectives", "diverged-log-keys", "mismatched-collective", "crossed-groups"), _APART),
    **dict.fromkeys(
        ("stopped-early", "skipped-step", "sampler-disagreement", "different-trainer-settings"),
        (*_APART, *_ALONE),
    ),
    # Lightning raises where there is no batch at all.
    "uneven-batches": (*_APART, *_ALONE, "failed-rank"),
    "failed-rank": (*_FAILED, "dead-rank", "no-dump"),
    "unused-parameters": _FAILED,
    "worker-died": (*_FAILED, *_ALONE),
    # The rank lives on, and calls something else.
    "gpu-memory-exhausted": (*_FAILED, *_APART),
}

Left = recordings.Recording


def make(folder: Path, *, causes: tuple[str, ...], ranks: tuple[int, ...] | None, place: str) -> Left:
    """A recording, from a folder with ``job.log`` and dumps.

    Args:
        causes: The causes that are true of it.
        ranks: The ranks at fault; None if that cannot be said of some.
        place: The guilty line, ``"path/file.py:12"``; empty if there is none.

    Raises:
        ValueError: It would name the host, the user or a path; the message says which.
    """
    log = (folder / "job.log").read_text(encoding="utf-8", errors="replace")
    dumps = {
        str(rank_of(path.name)): _plain(from_pickle(path.read_bytes()))
        for path in sorted(folder.glob("nccl_trace_rank_*"))
    }
    found: Left = {
        "schema": recordings.SCHEMA,
        "causes": causes,
        "ranks": ranks,
        "place": Path(place).name,
        "log": "\n".join(line for line in log.splitlines() if not (_LEFT_OUT.match(line) or _CODE.fullmatch(line))),
        "dumps": dumps,
    }
    text = json.dumps(found)
    for pattern, known in _PLACES:
        text = re.sub(pattern, known, text)
    told = {word for word in recordings.private_words() if word in text}
    told |= {path for path in _PATH.findall(json.loads(text)["log"]) if not path.startswith(_KNOWN)}
    told |= {path for path in _files(json.loads(text)["dumps"]) if path.startswith("/") and not path.startswith(_KNOWN)}
    if told:
        raise ValueError(f"The recording has {', '.join(map(repr, sorted(told)))} in it, which is this host's own.")
    made: Left = json.loads(text)
    return made


def is_comparable(log: str) -> bool:
    """Whether a run says anything about its fault: user code got as far, and NCCL or a rank has failed."""
    has_failed = any(words in log for words in _OF_NCCL) or re.search(r"^\[rank\d+\]: Traceback ", log, re.MULTILINE)
    return bool(has_failed) and not any(words in log for words in _NOT_COMPARABLE)


def write(left: Left, path: Path) -> None:
    """Writes it, to be read by `recordings.read`.

    Raises:
        ValueError: It is larger than :data:`MOST_BYTES`.
    """
    packed = recordings.pack(left)
    if len(packed) > MOST_BYTES:
        raise ValueError(f"{path.name} has {len(packed):,} bytes, {MOST_BYTES:,} are allowed.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)


def files() -> list[Path]:
    """All recordings."""
    return sorted(FOLDER.glob("*.json.gz"))


def laid_out(left: Left, folder: Path) -> None:
    """Writes the log and the dumps to a folder, as the run left them."""
    (folder / "job.log").write_text(left["log"], encoding="utf-8")
    for rank, dump in left["dumps"].items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def answer(folder: Path) -> Finding | None:
    """The first finding on what lies in a folder."""
    evidence = Artifacts()
    evidence.read(str(folder))
    job = evidence.job()
    findings = judge(job, RECORDED_RULES).findings if job is not None else ()
    return findings[0] if findings else None


def wrong(left: Left, first: Finding | None) -> list[str]:
    """What a finding has wrong: its kind, the ranks."""
    if first is None:
        return ["no finding"]
    said = []
    kinds = {kind for cause in left["causes"] for kind in (cause, *_KINDS.get(cause, _ALONE))}
    if first.rule not in kinds:
        said.append(f"kind {first.rule}, but the cause is {' or '.join(left['causes'])}")
    if left["ranks"] is not None and [*first.ranks] != [*left["ranks"]]:
        said.append(f"ranks {[*first.ranks]}, not {[*left['ranks']]}")
    return said


def shows_line(left: Left, first: Finding | None) -> bool:
    """Whether a finding gives the guilty line."""
    return bool(left["place"]) and first is not None and Path(first.location).name.startswith(f"{left['place']} ")


def _plain(dump: dict[Any, Any]) -> dict[str, Any]:
    kept = {str(name): value for name, value in dump.items() if name in _OF_A_DUMP}
    kept["entries"] = [
        {name: value for name, value in entry.items() if name not in _OF_NO_USE}
        | {"time_created_ns": entry["time_created_ns"] // _MS * _MS}
        for entry in kept.get("entries", ())
    ]
    return kept


def _files(dumps: dict[str, Any]) -> set[str]:
    entries = (entry for dump in dumps.values() for entry in dump["entries"])
    return {str(frame["filename"]) for entry in entries for frame in entry.get("frames", ())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what without_us.py has kept")
    parser.add_argument("--only-judge", action="store_true", help="write nothing")
    options = parser.parse_args()
    sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "tests" / "programs" / "faults")]
    from catalogue import CASES

    right = lines = 0
    folders = [folder for folder in sorted(options.folder.iterdir()) if is_comparable((folder / "job.log").read_text())]
    for folder in folders:
        case = CASES[folder.name]
        ranks = case.ranks if case.scenario.has_ranks else None
        try:
            left = make(folder, causes=case.scenario.causes, ranks=ranks, place=case.place.strip())
            if not options.only_judge:
                write(left, FOLDER / f"{case.name}.json.gz")
        except ValueError as error:
            print(f"{case.name}: no recording: {error}")
            continue
        first = answer(folder)
        said = wrong(left, first)
        right, lines = right + (not said), lines + shows_line(left, first)
        print(f"{case.name}: {'; '.join(said) or 'right'}{', with the line' if shows_line(left, first) else ''}")
    print(f"{right} of {len(folders)} are right; {lines} give the line.")


if __name__ == "__main__":
    main()
