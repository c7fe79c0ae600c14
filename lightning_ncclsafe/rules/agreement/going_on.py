"""Whether ranks that disagree about their data may train anyway: what would hang, and what the user allows."""

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.rules.agreement.batches import ends_unevenly
from lightning_ncclsafe.rules.kit import HOW_DATA_DIFFERS, Finding, Hangs, JobData, Severity

_WAY = "To train anyway: Trainer(callbacks=[DatasetAgreement({options})])."


def is_refused(finding: Finding, job: JobFacts) -> bool:
    """Whether ranks refuse to start with this finding."""
    hangs = HOW_DATA_DIFFERS[finding.rule].hangs
    if hangs is Hangs.AT_ONCE:
        return True
    wanted = {facts.data.on_mismatch for facts in job.ranks if facts.data is not None}
    if finding.severity is not Severity.ERROR or wanted == {"warn"}:
        return False
    return "raise" in wanted or hangs is not Hangs.NO or _end_unevenly(job)


def way_on(findings: tuple[Finding, ...], job: JobFacts) -> str:
    """How to train anyway, as a sentence; empty if that is impossible."""
    errors = {HOW_DATA_DIFFERS[finding.rule].hangs for finding in findings if finding.severity is Severity.ERROR}
    if errors & {Hangs.AT_ONCE, Hangs.LATER}:
        return ""
    uneven = Hangs.IF_UNEVEN in errors or _end_unevenly(job)
    return _WAY.format(options='on_mismatch="warn"' + (', on_uneven="stop_together"' if uneven else ""))


def _end_unevenly(job: JobFacts) -> bool:
    view = JobData(job)
    return any(ends_unevenly(view, loader) for loader in view.loaders)
