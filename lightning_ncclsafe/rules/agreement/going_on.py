"""Whether ranks that disagree about their data can go on all the same: what would hang, and what a user may allow."""

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.rules.agreement.counts import ends_apart
from lightning_ncclsafe.rules.kit import Finding, JobData, Severity

# With these there is no going on: ranks would call different collectives next.
_NEVER = frozenset({"loader-count", "settings-disagreement"})
# With these Lightning waits for ever, sooner or later, and no vote of ours changes that.
_HANG = frozenset({"validation-step", "unreadable-loader"})
# These a vote on each batch, or a common length, can mend.
_UNEVEN = frozenset({"sized-and-unsized", "unequal-batches"})

_WAY = "To train anyway: Trainer(callbacks=[DatasetAgreement({options})])."


def is_refused(finding: Finding, job: JobFacts) -> bool:
    """Whether ranks do not start with a finding.

    Args:
        finding: What was found.
        job: What ranks have presented.
    """
    if finding.rule in _NEVER:
        return True
    wanted = {facts.data.on_mismatch for facts in job.ranks if facts.data is not None}
    if finding.severity is not Severity.ERROR or wanted == {"warn"}:
        return False
    return "raise" in wanted or finding.rule in _HANG | _UNEVEN or _end_apart(job)


def way_on(findings: tuple[Finding, ...], job: JobFacts) -> str:
    """How to train all the same, as a sentence; empty where there is no way.

    Args:
        findings: What was found.
        job: What ranks have presented.
    """
    errors = {finding.rule for finding in findings if finding.severity is Severity.ERROR}
    if errors & (_NEVER | _HANG):
        return ""
    uneven = errors & _UNEVEN or _end_apart(job)
    return _WAY.format(options='on_mismatch="warn"' + (', on_uneven="stop_together"' if uneven else ""))


def _end_apart(job: JobFacts) -> bool:
    view = JobData(job)
    return any(ends_apart(view, loader) for loader in view.loaders)
