"""Ranks that their machine holds up, whatever line they have come to."""

from collections.abc import Callable, Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.hang.blocked_on_disk import blocked_on_disk
from lightning_ncclsafe.rules.hang.gc_pause import gc_pause
from lightning_ncclsafe.rules.hang.host_starved import host_starved

_RULES: tuple[Callable[[JobFacts], Iterable[Finding]], ...] = (gc_pause, host_starved, blocked_on_disk)


def held_up_by_machine(job: JobFacts) -> frozenset[int]:
    """Ranks that get no core or memory, collect garbage, or wait for storage, as far as that is at least likely."""
    findings = (finding for rule in _RULES for finding in rule(job))
    return frozenset(
        rank for finding in findings if finding.confidence is not Confidence.POSSIBLE for rank in finding.ranks
    )
