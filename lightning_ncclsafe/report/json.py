"""A diagnosis as ``report.json``, the public contract, and back."""

import json
from typing import Any

from lightning_ncclsafe.codec import DecodeError, from_plain, to_plain
from lightning_ncclsafe.findings import Diagnosis

SCHEMA = 1
_KEYS = ("findings", "unanswered", "job")
_ORDER = ("rule", "severity", "confidence", "summary", "ranks", "location", "evidence", "remedy")


class ReportError(ValueError):
    """The data is not a report that this version can read; the message says what was found and what was expected."""


def report_json(diagnosis: Diagnosis) -> bytes:
    """The diagnosis as indented JSON, the most probable finding first."""
    plain = to_plain(diagnosis)
    findings = [{key: finding[key] for key in _ORDER} for finding in plain["findings"]]
    report = {"schema": SCHEMA, "findings": findings, "unanswered": plain["unanswered"], "job": plain["job"]}
    return json.dumps(report, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


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
