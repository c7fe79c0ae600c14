"""A diagnosis as ``report.json``, the public contract, and back; and ``plan.json`` next to it, for the next start."""

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.facts.codec import DecodeError, encode, from_plain, to_plain
from lightning_ncclsafe.facts.findings import Diagnosis, NextStart, Plan
from lightning_ncclsafe.report.lines import safe

SCHEMA = 1
_KEYS = ("findings", "unanswered", "job")
# Up to this many ranks, people can still read the file, and it is quickly written.
_INDENTED = 16
_ORDER = ("rule", "severity", "confidence", "summary", "ranks", "location", "decided_at", "evidence", "remedy", "plan")


class ReportError(ValueError):
    """The data is not a report that this version can read; the message says what was found and what was expected."""


def report_json(diagnosis: Diagnosis) -> bytes:
    """The diagnosis as indented JSON, the most probable finding first; a line for each of many ranks."""
    job = diagnosis.job
    few = len(job.ranks) <= _INDENTED
    plain = to_plain(replace(diagnosis, job=job if few else replace(job, ranks=())))
    findings = [{key: finding[key] for key in _ORDER} for finding in plain["findings"]]
    report = {"schema": SCHEMA, "findings": findings, "unanswered": plain["unanswered"], "job": plain["job"]}
    text = json.dumps(report, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    return text if few else _with_ranks(text, job.ranks)


def _with_ranks(report: bytes, ranks: Sequence[RankFacts]) -> bytes:
    """Adds one line per rank: Python's own indentation would take a minute for a large job."""
    before, empty, after = report.rpartition(b'\n    "ranks": [],\n')
    opening, _, closing = empty.partition(b"]")
    lines = [b",\n      " + encode(facts) for facts in ranks]
    lines[0] = lines[0][1:]
    return b"".join([before, opening, *lines, b"\n    ]", closing, after])


def read_report(data: bytes) -> Diagnosis:
    """Reads what :func:`report_json` wrote.

    Raises:
        ReportError: If the data is not a report, is damaged, or was written under another schema number.
    """
    report = _loaded(data)
    _check_schema(report)
    absent = [key for key in _KEYS if key not in report]
    if absent:
        raise ReportError(f"The report lacks {', '.join(map(repr, absent))}; expected the keys {', '.join(_KEYS)}.")
    try:
        return from_plain(Diagnosis, {key: report[key] for key in _KEYS})
    except DecodeError as error:
        raise ReportError(f"The report is damaged. {error}") from error


def _loaded(data: bytes) -> dict[str, Any]:
    try:
        report = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReportError(_why_not_json(data, error)) from error
    if not isinstance(report, dict):
        raise ReportError(f"Not a report: expected a JSON object, found {type(report).__name__}.")
    return report


def _why_not_json(data: bytes, error: Exception) -> str:
    if not data.strip():
        return "Not a report: the file is empty."
    if data.lstrip().startswith(b"{"):
        return f"The report is damaged or was cut off: copy it again ({error})."
    return "Not a report: expected JSON. Logs and dumps are read by: ncclsafe diagnose."


def _check_schema(report: dict[str, Any]) -> None:
    schema = report.get("schema")
    if schema is None:
        raise ReportError(f"Not a report: it has no 'schema' number; this version reads schema {SCHEMA}.")
    if schema != SCHEMA or isinstance(schema, bool):
        raise ReportError(
            f"The report was written by another version: schema {schema!r:.40}, this one reads {SCHEMA}. "
            "Use the version of lightning-ncclsafe that wrote it."
        )


PLAN_SCHEMA = 1
PLAN_FILE = "plan.json"
# A plan has some hundred bytes; the hosts of a large job, some kilobytes.
_MOST_BYTES = 1 << 18
_LONGEST = 2_000
_WORDS = {
    Plan.RESTART: "restart: nobody's fault, or a passing fault of a machine",
    Plan.STOP: "stop: the fault recurs until the code, its settings or its data change",
    Plan.UNKNOWN: "unknown: the cause does not show whether a restart helps",
}


def plan_words(start: NextStart) -> str:
    """``"restart without gpu-7: the fault is on that host, and recurs there"``."""
    if start.plan is not Plan.RESTART_WITHOUT_HOST:
        return _WORDS[start.plan]
    whose = "that host" if len(start.hosts) == 1 else "those hosts"
    return safe(f"restart without {', '.join(start.hosts)}: the fault is on {whose}, and recurs there")


def plan_json(start: NextStart) -> bytes:
    """The plan as it is written to the file."""
    plain = to_plain(replace(start, answer=start.answer[:_LONGEST]))
    return json.dumps({"schema": PLAN_SCHEMA, **plain}, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def read_plan(path: Path) -> NextStart | None:
    """Reads such a file; None if it does not exist, is no plain file, is damaged, or has another schema."""
    try:
        # Neither waits for the writer of a pipe, nor follows a link to somewhere else.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return None
            content = file.read(_MOST_BYTES + 1)
        return _parsed(content) if len(content) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _parsed(content: bytes) -> NextStart | None:
    plain: Any = json.loads(content)
    if not isinstance(plain, dict) or plain.get("schema") != PLAN_SCHEMA or isinstance(plain["schema"], bool):
        return None
    try:
        start = from_plain(NextStart, plain)
    except DecodeError:
        return None
    return replace(start, answer=safe(start.answer[:_LONGEST]), hosts=tuple(map(safe, start.hosts)))
