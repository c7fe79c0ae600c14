"""A report of a hang says of the rank that causes it that it was late before."""

from dataclasses import replace
from datetime import datetime, timezone

import pytest
from builders import GLOO, NEXT, NEXT_DATA, job

from lightning_ncclsafe.facts import JobFacts, Straggler
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit import Rule, Timeline

OPENED_NS = int(datetime(2026, 3, 4, 12, 30, 0, tzinfo=timezone.utc).timestamp() * 1e9)
S = 1_000_000_000
LATE = Straggler(
    rank=2,
    phase="data loading",
    share=0.94,
    of_steps=200,
    mean_s=0.038,
    op="all_reduce",
    since_ns=OPENED_NS - 252 * S,
    until_ns=OPENED_NS - 20 * S,
)
HOW = Evidence(rank=2, source="stack", text="It reads a file.")


def finding(*ranks: int) -> Finding:
    return Finding(rule="slow-data", summary="A rank is loading.", ranks=ranks, remedy="Wait.", evidence=(HOW,))


def told_of(findings: list[Finding], job: JobFacts) -> list[Finding]:
    """What the judge makes of findings that a rule has made."""
    return [*judge(job, (Rule("slow-data", lambda _: findings, Timeline),)).findings]


def job_of(*told: tuple[Straggler, ...]) -> JobFacts:
    """A hang of three ranks, of which each knows something of stragglers."""
    loading = GLOO.working(2, NEXT_DATA, seq=39, action=NEXT, batch=5)
    made = job(GLOO.waiting(0, seq=40), GLOO.waiting(1, seq=40), loading)
    ranks = tuple(
        replace(facts, stragglers=known) for facts, known in zip(made.ranks, [*told, (), (), ()], strict=False)
    )
    return replace(made, ranks=ranks, incident=replace(made.incident, opened_ns=OPENED_NS))


def test_the_sentence() -> None:
    (told,) = told_of([finding(2)], job_of((LATE,)))
    assert told.evidence[0] == HOW, "what was known stays, and comes first"
    assert told.evidence[1:] == (
        Evidence(
            rank=2,
            source="collective times",
            text=(
                "It kept the others waiting before: late in 94% of 200 steps, by 38 ms on average, in data "
                "loading, since 12:25:48 UTC, 4 min 12 s ago."
            ),
        ),
    )
    assert replace(told, evidence=(HOW,)) == finding(2)


def test_one_that_had_recovered_is_said_to_have() -> None:
    (told,) = told_of([finding(2)], job_of((replace(LATE, is_over=True),)))
    assert told.evidence[-1].text.endswith("4 min 12 s ago; it had recovered.")


def test_without_a_phase_none_is_named() -> None:
    (told,) = told_of([finding(2)], job_of((replace(LATE, phase=""),)))
    assert "by 38 ms on average, since 12:25:48 UTC" in told.evidence[-1].text


def test_a_clock_that_was_set_back_makes_no_negative_time() -> None:
    (told,) = told_of([finding(2)], job_of((replace(LATE, since_ns=OPENED_NS + 5 * S),)))
    assert "0.0 s ago" in told.evidence[-1].text


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_report_of_a_straggler_counts_whichever_rank_has_it(order: tuple[int, int]) -> None:
    known = ((LATE,), (replace(LATE, share=0.5, until_ns=OPENED_NS, is_over=True),))
    (told,) = told_of([finding(2)], job_of(known[order[0]], known[order[1]]))
    assert len(told.evidence) == 2
    assert "late in 50%" in told.evidence[1].text


def test_findings_about_others_and_about_nobody_stay_as_they_are() -> None:
    findings = [finding(0), finding(), finding(1, 2)]
    told = told_of(findings, job_of((LATE,)))
    assert told[:2] == findings[:2]
    assert [evidence.rank for evidence in told[2].evidence] == [2, 2]


def test_each_of_several_ranks_has_its_own() -> None:
    (told,) = told_of([finding(1, 2)], job_of((LATE, replace(LATE, rank=1, mean_s=0.02))))
    assert [(evidence.rank, "20 ms" in evidence.text) for evidence in told.evidence[1:]] == [(1, True), (2, False)]


def test_where_nobody_was_late_nothing_is_reported() -> None:
    assert told_of([finding(2)], job_of()) == [finding(2)]


def test_the_report_of_a_hang_cites_it() -> None:
    diagnosis = judge(job_of((LATE,)))
    assert 2 in diagnosis.findings[0].ranks
    assert [one.text for one in diagnosis.findings[0].evidence if one.source == "collective times"] == [
        "It kept the others waiting before: late in 94% of 200 steps, by 38 ms on average, in data loading, since "
        "12:25:48 UTC, 4 min 12 s ago."
    ]
    without = judge(job_of())
    assert not [one for found in without.findings for one in found.evidence if one.source == "collective times"]
