"""What the guard raises."""

from lightning_ncclsafe.facts.findings import Finding


class CollectiveTimeoutError(RuntimeError):
    """The run is ended because ranks wait for a collective that cannot complete; from then on nothing is saved.

    At the limit the process exits instead, with status 124, and this is raised where another thread wants to save.

    Attributes:
        findings: The causes found, the most probable first.
        report_folder: The folder with ``report.txt`` and ``report.json``; empty where none could be written.
    """

    def __init__(self, answer: str, *, findings: tuple[Finding, ...] = (), report_folder: str = "") -> None:
        where = f"\nThe report is in {report_folder}" if report_folder else ""
        super().__init__(f"{answer}{where}")
        self.findings = findings
        self.report_folder = report_folder


class DatasetMismatchError(RuntimeError):
    """The ranks disagree about their data, so training does not start. Raised on all ranks, with the same text.

    Without the callback ``DatasetAgreement`` only where they would hang; with it, whatever they disagree about.

    Attributes:
        findings: What differs, the most telling first.
        report_folder: The folder with ``report.txt`` and ``report.json``; empty where none could be written.
    """

    def __init__(self, text: str, *, findings: tuple[Finding, ...] = (), report_folder: str = "") -> None:
        where = f"\nThe report is in {report_folder}" if report_folder else ""
        super().__init__(f"{text}{where}")
        self.findings = findings
        self.report_folder = report_folder


class UnevenDataError(DatasetMismatchError):
    """The data of one rank has ended before that of another. Raised on all ranks before the same batch."""


class HostPreflightError(RuntimeError):
    """A host has a problem with which the run would fail, so it does not start. Raised on all ranks, with one text.

    Attributes:
        findings: What was found, the worst first.
        report_folder: The folder with ``report.txt`` and ``report.json``; empty where none could be written.
    """

    def __init__(self, text: str, *, findings: tuple[Finding, ...] = (), report_folder: str = "") -> None:
        where = f"\nThe report is in {report_folder}" if report_folder else ""
        super().__init__(f"{text}{where}")
        self.findings = findings
        self.report_folder = report_folder
