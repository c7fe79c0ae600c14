"""What the times of its collectives have said of a rank before it is found to be the cause of something."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone

from lightning_ncclsafe.facts import JobFacts, Straggler
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.rules.kit.wording import duration_words


def with_past_lateness(findings: Iterable[Finding], job: JobFacts) -> list[Finding]:
    """The same findings; those about ranks that have kept the others waiting before say so, and since when."""
    known = _latest(job)
    return [
        replace(
            finding,
            evidence=(*finding.evidence, *(_evidence(known[rank], job) for rank in finding.ranks if rank in known)),
        )
        for finding in findings
    ]


def _latest(job: JobFacts) -> dict[int, Straggler]:
    """Every rank knows as much as it was told last."""
    told = [straggler for facts in job.ranks for straggler in facts.stragglers]
    return {straggler.rank: straggler for straggler in sorted(told, key=lambda one: one.until_ns)}


def _evidence(straggler: Straggler, job: JobFacts) -> Evidence:
    began = datetime.fromtimestamp(straggler.since_ns / 1e9, tz=timezone.utc)
    ago_s = max((job.incident.opened_ns - straggler.since_ns) / 1e9, 0.0)
    where = f", in {straggler.phase}" if straggler.phase else ""
    ended = "; it had recovered" if straggler.is_over else ""
    return Evidence(
        rank=straggler.rank,
        source="collective times",
        text=(
            f"It had kept the others waiting before: late in {straggler.share:.0%} of {straggler.of_steps} steps, by "
            f"{straggler.mean_s * 1e3:.0f} ms on average{where}, since {began:%H:%M:%S} UTC, {duration_words(ago_s)} "
            f"ago{ended}."
        ),
    )
