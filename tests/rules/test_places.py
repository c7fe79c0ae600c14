"""Hosts in findings: which cannot be reached, and on which the ranks run that are named."""

from dataclasses import replace

from builders import GLOO, job
from scenes import host_can_be_reached, host_is_cut_off, host_of_one_rank_is_cut_off

from lightning_ncclsafe.facts import IncidentKind, JobFacts
from lightning_ncclsafe.rules.judging import judge


def places(facts: JobFacts) -> list[str]:
    return [item.text for item in judge(facts).findings[0].evidence if item.source == "place"]


def test_the_host_and_since_when_are_reported() -> None:
    facts = host_is_cut_off(GLOO)
    taken = [replace(one, taken_ns=1_700_000_000 * 10**9) for one in facts.ranks]
    # The second report on an incident is opened by the first: what ranks say of themselves is newer.
    incident = replace(facts.incident, kind=IncidentKind.TIMEOUT, opened_ns=1_699_999_000 * 10**9)
    (first, *_) = judge(replace(facts, ranks=tuple(taken), incident=incident)).findings
    assert first.summary.startswith(
        "Ranks 2-3 on node-2 have not answered since 22:12:57 UTC (23 s ago), and the host cannot be reached from "
        "node-1, while ranks 0-1 wait in "
    )
    assert "no answer within 1 s" in first.evidence[-1].text
    assert "--exclude=node-2" in first.remedy


def test_several_hosts_are_named_together() -> None:
    facts = host_is_cut_off(GLOO)
    (host,) = facts.silent_hosts
    lost = tuple(replace(host, host=f"node-{rank}", ranks=(rank,)) for rank in (2, 3))
    (first, *_) = judge(replace(facts, silent_hosts=lost)).findings
    assert first.ranks == (2, 3)
    assert "on node-2 and node-3 have not answered" in first.summary
    assert "the hosts cannot be reached" in first.summary


def test_the_rank_of_a_host_that_is_cut_off_is_not_called_dead() -> None:
    found = judge(host_of_one_rank_is_cut_off(GLOO)).findings
    assert {finding.rule for finding in found if 3 in finding.ranks} == {"unreachable-host"}


def test_a_host_that_answers_is_not_to_blame() -> None:
    (first, *_) = judge(host_can_be_reached(GLOO)).findings
    assert "The processes there do not answer." in first.evidence[-1].text


def test_with_several_hosts_each_finding_says_where_its_ranks_run() -> None:
    assert places(host_is_cut_off(GLOO)) == ["Ranks 2-3 run on node-2."]
    apart = [replace(GLOO.waiting(rank, seq=61), host=f"node-{rank}") for rank in (0, 1)]
    late = replace(GLOO.working(2, seq=60), host="node-2")
    assert places(job(*apart, late, world=3)) == ["Rank 2 runs on node-2."]


def test_with_one_host_nothing_is_reported_of_it() -> None:
    facts = job(GLOO.waiting(0, seq=61), GLOO.working(1, seq=60), world=2)
    assert judge(facts).findings[0].ranks == (1,)
    assert places(facts) == []
