"""Recordings of hangs on real NCCL: the facts that ranks gathered, with what is true of them.

``scoreboard.py --gpu --reports FOLDER`` runs faulty trainings on a GPU and keeps their reports; this makes recordings
of those: ``python tests/programs/gpu/hangs.py FOLDER``. ``hangs/CASE@STRATEGY.json.gz`` holds ``schema``, ``causes``,
``ranks`` (null if it cannot be said of some that they cause it), ``place`` (``"file.py:12"``; empty if no line is at
fault), ``versions`` and ``job``. Nothing in it names a host, a user or a path of the machine that it comes from.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import recordings

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.codec import from_plain
from lightning_ncclsafe.rules.judging import judge

FOLDER = recordings.FOLDER / "hangs"
_ROOT = Path(__file__).parents[3]
# Where files of packages and of this project are said to be, whatever the machine.
_PLACES = ((r"[^\"]*/site-packages/", "/venv/site-packages/"), (r"[^\"]*/lib/python3\.\d+/", "/usr/lib/python3/"))

Hang = recordings.Recording


def make(report: dict[str, Any], *, causes: tuple[str, ...], ranks: tuple[int, ...] | None, place: str) -> Hang:
    """A recording, from a report.

    Args:
        report: What ``report.json`` holds.
        causes: The causes that are true of it.
        ranks: The ranks at fault; None if that cannot be said of some.
        place: The guilty line, ``"path/file.py:12"``; empty if there is none.

    Raises:
        ValueError: It would name the host, the user or a path; the message says which.
    """
    text = json.dumps(report["job"])
    for found, known in _PLACES:
        text = re.sub(f'"{found}', f'"{known}', text)
    text = re.sub(r"GPU-[0-9a-f-]{36}", "GPU-0", text.replace(f"{_ROOT}/", "/train/"))
    if told := [word for word in recordings.private_words() if word in text]:
        raise ValueError(f"The recording has {', '.join(map(repr, told))} in it, which is this host's own.")
    job = json.loads(text)
    versions = job["ranks"][0].get("versions", {}) if job["ranks"] else {}
    file = Path(place).name
    return {
        "schema": recordings.SCHEMA,
        "causes": causes,
        "ranks": ranks,
        "place": file,
        "versions": versions,
        "job": job,
    }


def write(hang: Hang, path: Path) -> None:
    """Writes it, to be read by `recordings.read`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(recordings.pack(hang))


def files() -> list[Path]:
    """All recordings."""
    return sorted(FOLDER.glob("*.json.gz"))


def wrong(hang: Hang) -> list[str]:
    """What the first finding of today's rules has wrong: the cause, the ranks, the line."""
    findings = judge(from_plain(JobFacts, hang["job"])).findings
    if not findings:
        return ["no finding"]
    first = findings[0]
    said = []
    if first.rule not in hang["causes"]:
        said.append(f"cause {first.rule}, not {' or '.join(hang['causes'])}")
    if hang["ranks"] is not None and [*first.ranks] != [*hang["ranks"]]:
        said.append(f"ranks {[*first.ranks]}, not {[*hang['ranks']]}")
    if hang["place"] and not Path(first.location).name.startswith(f"{hang['place']} "):
        said.append(f"{first.location or 'no line'}, not {hang['place']}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="reports that the scoreboard has kept")
    parser.add_argument("--strategy", default="SafeDDP", help="with which they ran (default: %(default)s)")
    options = parser.parse_args()
    sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "tests" / "programs" / "faults")]
    from catalogue import CASES

    for path in sorted(options.folder.glob("*.json")):
        case = CASES[path.stem]
        if case.is_healthy:
            continue
        ranks = case.ranks if case.scenario.has_ranks else None
        report = json.loads(path.read_text())
        hang = make(report, causes=case.scenario.causes, ranks=ranks, place=case.place.strip())
        write(hang, FOLDER / f"{case.name}@{options.strategy}.json.gz")
        print(f"{case.name}@{options.strategy}: {'; '.join(wrong(hang)) or 'right'}")


if __name__ == "__main__":
    main()
