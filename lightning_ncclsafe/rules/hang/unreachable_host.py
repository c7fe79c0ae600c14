"""The cause unreachable-host: neither a host nor any of its ranks answers."""

from collections.abc import Iterator
from datetime import datetime, timezone

from lightning_ncclsafe.facts import JobFacts, SilentHost
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Evidence,
    Finding,
    Plan,
    Timeline,
    duration_words,
    finding,
    hang_rule,
    ranks_words,
    tried_words,
    verb,
    while_others_wait,
)

_FEW = 3


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``restart-without-host`` if most hosts still answer; ``restart`` if each side may blame the other."""
    here = {facts.host for facts in view.job.ranks}
    return Plan.RESTART_WITHOUT_HOST if len(here) > len(view.job.silent_hosts) else Plan.RESTART


@hang_rule(after="mismatched-collective", plan=_plan)
def unreachable_host(view: Timeline) -> Iterator[Finding]:
    """A host is down or cut off from the others: neither it nor any of its ranks answers.

    Symptom:
        All ranks on the other hosts wait; those of one host print nothing more.

    Cause:
        The host lost power or its kernel stopped, or its link, a switch or a firewall cuts it off.

    Remedy:
        Check the host and the network to it; restart the job without it.

    Cannot see:
        Whether the host or the network to it is to blame; what its ranks do meanwhile: they write a report of their
        own, on their host. A host that silently drops connections counts as unreachable.
    """
    lost = tuple(host for host in view.job.silent_hosts if host.answers is False)
    if not lost:
        return
    ranks = tuple(sorted(rank for host in lost for rank in host.ranks))
    them = "it" if len(lost) == 1 else "them"
    text = (
        f"{ranks_words(ranks)} on {_names(lost)} {verb(ranks, 'has', 'have')} not answered since "
        f"{_since(view.job)}, and "
        f"the {'host' if len(lost) == 1 else 'hosts'} cannot be reached from {lost[0].seen_from}"
        f"{while_others_wait(view, ranks)}."
    )
    yield finding(
        view,
        ranks,
        text,
        evidence=tuple(_evidence(host) for host in lost[:LISTED]),
        remedy=f"Look at {_names(lost)} and at the network between {them} and {lost[0].seen_from}: power, the kernel's "
        f"log (dmesg), the link and its switch port. Start the job again without {them}, under SLURM with --exclude="
        f"{','.join(host.host for host in lost[:LISTED])}.",
        location="",
    )


def _names(hosts: tuple[SilentHost, ...]) -> str:
    names = [host.host for host in hosts[:_FEW]]
    if len(hosts) > _FEW:
        return f"{', '.join(names)}, … ({len(hosts)} hosts)"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _since(job: JobFacts) -> str:
    """When the waiting ranks last made progress, and so heard from all others."""
    idle_s = min((facts.progress.idle_s for facts in job.ranks), default=job.incident.idle_s)
    taken_s = max((facts.taken_ns / 1e9 for facts in job.ranks), default=job.incident.opened_ns / 1e9)
    last = datetime.fromtimestamp(taken_s - idle_s, tz=timezone.utc)
    return f"{last:%H:%M:%S} UTC ({duration_words(idle_s)} ago)"


def _evidence(host: SilentHost) -> Evidence:
    text = f"{tried_words(host)} No rank on it answered, and no other rank is there to observe them."
    return Evidence(source="network", text=text)
