"""The last line says what became of everything, and where the rest lies."""

from dataclasses import replace

import pytest

from lightning_ncclsafe.facts import LoggerFacts
from lightning_ncclsafe.loggers.ledger import is_worth_printing, summary

FACTS = LoggerFacts(
    logger="CSVLogger",
    path="/logs/v0",
    points=1200,
    records=3,
    thinned=40,
    dropped=5,
    longest_write_s=1.2345,
    waited_s=0.25,
    staging="/tmp/ncclsafe-0/logs/CSVLogger-1",
)


def test_the_summary_is_one_line() -> None:
    text = summary(FACTS, is_done=True)
    assert text.startswith(
        "CSVLogger wrote 1200 points and 3 other records to /logs/v0 (40 thinned, 5 dropped);"
        " longest write 1.23 s; training waited 0.25 s for it"
    )
    assert "\n" not in text


@pytest.mark.parametrize(
    ("points", "records", "said"),
    [
        (0, 0, "wrote 0 points to"),
        (1, 0, "wrote 1 point to"),
        (2, 0, "wrote 2 points to"),
        (0, 1, "wrote 0 points and 1 other record to"),
        (1, 2, "wrote 1 point and 2 other records to"),
    ],
)
def test_counts_of_one_are_singular(points: int, records: int, said: str) -> None:
    assert said in summary(replace(FACTS, points=points, records=records), is_done=True)


def test_a_missing_path_is_omitted() -> None:
    assert " and 3 other records (40 thinned" in summary(replace(FACTS, path=""), is_done=True)


@pytest.mark.parametrize(("faults", "said"), [(1, "\n1 failure, the last: "), (2, "\n2 failures, the last: ")])
def test_failures_are_counted_and_the_last_one_is_printed(faults: int, said: str) -> None:
    text = summary(replace(FACTS, faults=faults, last_fault="OSError(5, 'x')"), is_done=True)
    assert text.endswith(f"{said}OSError(5, 'x')")


def test_staged_data_is_printed_with_its_recovery_command() -> None:
    text = summary(replace(FACTS, staged_bytes=2048), is_done=False)
    first, rest = text.split("\n")
    assert first == summary(FACTS, is_done=True)
    assert f"2.0 kB wait in {FACTS.staging};" in rest
    assert rest.endswith(f"ncclsafe logs recover {FACTS.staging}")
    assert "recover" not in first


def test_failures_are_printed_before_staged_data() -> None:
    text = summary(replace(FACTS, faults=1, last_fault="gone", staged_bytes=1, memory_bytes=2), is_done=False)
    assert [line.split(" ")[0] for line in text.split("\n")] == ["CSVLogger", "1", "not", "2"]


WELL = replace(FACTS, thinned=0, dropped=0)


@pytest.mark.parametrize(
    ("changes", "is_done", "is_printed"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"thinned": 1}, True, True),
        ({"dropped": 1}, True, True),
        ({"faults": 1}, True, True),
        ({"longest_write_s": 2.0}, True, True),
        ({"longest_wait_s": 5.0}, True, True),
        ({"waited_s": 5000.0}, True, False),  # in a long run
        ({"finalize_s": 5.0}, True, True),
        ({"longest_write_s": 1.9, "longest_wait_s": 4.9, "finalize_s": 4.9}, True, False),
    ],
)
def test_only_thinned_dropped_or_late_data_is_worth_printing(
    changes: dict[str, float], is_done: bool, is_printed: bool
) -> None:
    assert is_worth_printing(replace(WELL, **changes), is_done=is_done) is is_printed  # type: ignore[arg-type]
