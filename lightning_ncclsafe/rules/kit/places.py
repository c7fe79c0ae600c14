"""On which host the ranks run that a finding names: with several hosts, the first thing to know."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from lightning_ncclsafe.facts import IncidentKind, JobFacts
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.rules.kit.wording import capitalised, ranks_words, verb

_FEW = 4


def with_places(findings: Iterable[Finding], job: JobFacts) -> list[Finding]:
    """The same findings; where the job has several hosts, each says first where the ranks run that it names."""
    hosts = hosts_of(job)
    # Where ranks are only compared, what is compared is said with its host.
    if len(set(hosts.values())) < 2 or job.incident.kind in (IncidentKind.DATA, IncidentKind.PREFLIGHT):
        return [*findings]
    return [replace(finding, evidence=(*_evidence(finding, hosts), *finding.evidence)) for finding in findings]


def hosts_of(job: JobFacts) -> dict[int, str]:
    """The host of each rank, as far as ranks have said so, or another rank has seen them on its own host."""
    seen = {peer.rank: facts.host for facts in job.ranks for peer in facts.peers}
    lost = {rank: host.host for host in job.silent_hosts for rank in host.ranks}
    said = {facts.rank: facts.host for facts in job.ranks}
    return {rank: host for rank, host in (seen | lost | said).items() if host}


def _evidence(finding: Finding, hosts: dict[int, str]) -> tuple[Evidence, ...]:
    there: dict[str, list[int]] = defaultdict(list)
    for rank in finding.ranks:
        if rank in hosts:
            there[hosts[rank]].append(rank)
    if not 0 < len(there) <= _FEW:
        return ()
    words = [f"{ranks_words(ranks)} {verb(ranks, 'runs', 'run')} on {host}" for host, ranks in there.items()]
    return (Evidence(source="place", text=capitalised("; ".join(words)) + "."),)
