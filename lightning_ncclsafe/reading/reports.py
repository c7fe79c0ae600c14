"""Our own reports: the facts in a ``report.json``, to be judged again."""

from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.reading.errors import ReadingError
from lightning_ncclsafe.report.json import ReportError, read_report

MOST_REPORT_BYTES = 1024 * 1024 * 1024
"""Of a report, which is small but for jobs of thousands of ranks: one of 16,384 has about half of it."""
MOST_REPORT_CONTAINERS = 20_000_000


def is_report(plain: object) -> bool:
    """Whether plain data is one of our reports, of whatever schema."""
    return isinstance(plain, dict) and "schema" in plain and "findings" in plain


def from_report(data: bytes) -> Diagnosis:
    """The diagnosis in a report.

    Raises:
        ReadingError: If it is damaged, or was written by another version.
    """
    try:
        return read_report(data)
    except ReportError as error:
        raise ReadingError(str(error).rstrip(".")) from error
