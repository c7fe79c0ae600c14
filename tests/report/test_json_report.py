"""report.json is a public contract: its keys, its order, and errors that say what to do."""

import json
from dataclasses import replace

import pytest
from diagnoses import diagnosis, with_first

from lightning_ncclsafe.report.json import ReportError, read_report, report_json


def test_a_report_round_trips() -> None:
    assert read_report(report_json(diagnosis())) == diagnosis()


def test_the_format_matches_the_contract() -> None:
    report = json.loads(report_json(diagnosis()))
    assert list(report) == ["schema", "findings", "unanswered", "job"]
    assert report["schema"] == 1
    (finding,) = report["findings"]
    keys = "rule severity confidence summary ranks location decided_at evidence remedy plan"
    assert [*finding] == keys.split()
    assert (finding["rule"], finding["severity"], finding["confidence"]) == (
        "rank-zero-only-work",
        "warning",
        "certain",
    )
    assert finding["evidence"][3] == {
        "source": "flight recorder",
        "text": "Ranks 1-3 wait in sequence number 61.",
        "rank": None,
    }


def test_the_json_is_indented() -> None:
    assert b'\n  "findings": [\n' in report_json(diagnosis())


def test_unencodable_text_does_not_prevent_the_report() -> None:
    assert (
        read_report(report_json(with_first(location="/tmp/\udcff.py:1 in f"))).findings[0].location
        == "/tmp/?.py:1 in f"
    )


def test_unknown_fields_are_ignored() -> None:
    report = json.loads(report_json(diagnosis()))
    report["colour"] = "blue"
    report["findings"][0]["score"] = 3
    assert read_report(json.dumps(report).encode()) == diagnosis()


def change(key: str, value: object) -> bytes:
    report = json.loads(report_json(diagnosis()))
    if value is None:
        del report[key]
    else:
        report[key] = value
    return json.dumps(report).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"hello", "expected JSON. Logs and dumps are read by: ncclsafe diagnose."),
        (b"\xff\xfe\x00", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "has no 'schema' number"),
        (change("schema", 7), "written by another version: schema 7, this one reads 1. Use the version"),
        (change("schema", "1"), "written by another version: schema '1', this one reads 1"),
        (change("schema", True), "written by another version: schema True"),
        (change("findings", None), "lacks 'findings'"),
        (change("job", None), "lacks 'job'"),
        (change("unanswered", 3), "Diagnosis.unanswered: found 3, expected list"),
        (change("findings", [{}]), "Diagnosis.findings[0]"),
        (change("job", {"incident": 1}), "Diagnosis.job.incident: found 1, expected dict"),
    ],
)
def test_invalid_reports_raise_a_clear_error(data: bytes, said: str) -> None:
    with pytest.raises(ReportError) as caught:
        read_report(data)
    assert said in str(caught.value)


def test_an_unknown_severity_is_named() -> None:
    damaged = report_json(diagnosis()).replace(b'"severity": "warning"', b'"severity": "bad"')
    with pytest.raises(ReportError, match="found 'bad', expected one of 'error', 'warning'"):
        read_report(damaged)


def test_an_empty_diagnosis_round_trips() -> None:
    empty = replace(diagnosis(), findings=(), unanswered=())
    assert read_report(report_json(empty)) == empty


def test_each_of_many_ranks_has_one_line() -> None:
    few = diagnosis()
    one = few.job.ranks[0]
    many = replace(few, job=replace(few.job, world_size=40, ranks=tuple(replace(one, rank=rank) for rank in range(40))))
    text = report_json(many)
    assert read_report(text) == many
    lines = [line for line in text.splitlines() if line.startswith(b'      {"rank":')]
    assert [json.loads(line.rstrip(b","))["rank"] for line in lines] == [*range(40)]
    assert list(json.loads(text)["job"]) == list(json.loads(report_json(few))["job"])
