"""What the guard raises."""

from lightning_ncclsafe.facts.findings import Finding


class _ReportedError(RuntimeError):
    """What a report explains; its text ends with where the report is."""

    def __init__(self, text: str, *, findings: tuple[Finding, ...] = (), report_folder: str = "") -> None:
        where = f"\nThe report is in {report_folder}" if report_folder else ""
        super().__init__(f"{text}{where}")
        self.findings = findings
        self.report_folder = report_folder


class CollectiveTimeoutError(_ReportedError):
    """The run ends because ranks wait for a collective that cannot complete; nothing more is saved.

    At the limit, the process exits with status 124 instead, and only a thread that tries to save gets this error.

    Attributes:
        findings: The causes found, the most probable first.
        report_folder: The folder with ``report.txt`` and ``report.json``; empty if none could be written.
    """


class DatasetMismatchError(_ReportedError):
    """The ranks disagree about their data, so training does not start. Raised on all ranks, with the same text.

    Without the callback ``DatasetAgreement``, raised only if they would hang; with it, for any disagreement.

    Attributes:
        findings: What differs, the most significant first.
        report_folder: The folder with ``report.txt`` and ``report.json``; empty if none could be written.
    """


class UnevenDataError(DatasetMismatchError):
    """The data of one rank has ended before that of another. Raised on all ranks before the same batch."""


class HostPreflightError(_ReportedError):
    """A host has a problem that would make the run fail, so it does not start. Raised on all ranks, with the same text.

    Attributes:
        findings: What was found, the worst first.
        report_folder: The folder with ``report.txt`` and ``report.json``; empty if none could be written.
    """


STOP_CODE = 78
"""Exit status of a start that ends because of its job's plan; ``EX_CONFIG`` of ``sysexits.h``."""


class PlannedStopError(SystemExit):
    """An earlier start of this job ended with a fault that would recur, so this start ends before training.

    Raised on all ranks, which exit with status 78. The reason is printed, and is in ``plan.json`` next to the report.

    Attributes:
        reason: Why, in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(STOP_CODE)
        self.reason = reason
