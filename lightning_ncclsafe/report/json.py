"""A diagnosis as ``report.json``, the public contract, and back."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.facts.codec import DecodeError, encode, from_plain, to_plain
from lightning_ncclsafe.facts.findings import Diagnosis

SCHEMA = 1
_KEYS = ("findings", "unanswered", "job")
# So many ranks are still readable for people, and quickly written.
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
        raise ReportError(f"Not a report: expected JSON, found {bytes(data[:40])!r} ({error}).") from error
    if not isinstance(report, dict):
        raise ReportError(f"Not a report: expected a JSON object, found {type(report).__name__}.")
    return report


def _check_schema(report: dict[str, Any]) -> None:
    schema = report.get("schema")
    if schema is None:
        raise ReportError(f"Not a report: it has no 'schema' number; this version reads schema {SCHEMA}.")
    if schema != SCHEMA or isinstance(schema, bool):
        raise ReportError(f"The report was written by another version: schema {schema!r:.40}, this one reads {SCHEMA}.")
