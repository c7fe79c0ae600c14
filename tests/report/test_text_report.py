"""The report in words: the answer first, nothing left out, nothing that grows or bites."""

import re
from dataclasses import replace
from typing import Any

import pytest
from diagnoses import diagnosis, facts, with_first

from lightning_ncclsafe.facts import (
    Collective,
    ExceptionFacts,
    Frame,
    Group,
    IncidentKind,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
    RecordFacts,
)
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.report.lines import safe, wrapped
from lightning_ncclsafe.report.text import render_news, render_short, render_text


def test_the_first_line_is_the_answer() -> None:
    answer = (
        "rank-zero-only-work: Rank 0 is working alone in Net.on_train_epoch_end at train.py:73 in evaluate, for 41 s."
    )
    assert render_text(diagnosis()).splitlines()[0] == answer
    assert render_short(diagnosis()).splitlines()[0] == answer


def test_the_full_report_has_everything() -> None:
    text = render_text(diagnosis())
    for part in (
        "Incident 1: rank 1 made no progress for 23 s. 3 of 4 ranks answered.",
        "1. rank-zero-only-work (certain, warning), rank 0",
        "Where: /home/me/train.py:73 in evaluate",
        "- [source code, rank 0] if trainer.is_global_zero encloses line 73.",
        "Share this work among all ranks.",
        "Rank 0: is in user code; no progress for 20 s; phase train, batch 118 of epoch 2, hook Net.on_train_epoch_end",
        "Ranks 1-2: wait in broadcast; no progress for 21 s to 22 s; phase train, batch 118 of epoch 2",
        "Rank 3: did not answer; its process is stopped (pid 4003)",
        "What these facts cannot tell",
        "- Rank 3 did not answer.",
        "Stack of rank 0\n---------------\n> /home/me/train.py:73 in evaluate: score(x)",
        "Stack of ranks 1-2\n",
    ):
        assert part in text, part
    assert text.index("Stack of rank 0") < text.index("Stack of ranks 1-2")


def test_the_short_report_is_short() -> None:
    lines = render_short(diagnosis()).splitlines()
    assert len(lines) <= 12
    assert "  where: /home/me/train.py:73 in evaluate" in lines
    assert "  remedy: Share this work among all ranks." in lines


def test_a_line_that_is_also_what_decided_is_told_once() -> None:
    where = diagnosis().findings[0].location
    for decided, lines in ((where, 0), ("/home/me/train.py:70 in evaluate", 1)):
        told = with_first(decided_at=decided)
        assert render_short(told).count("  decided: ") == lines
        assert render_text(told).count("   Decided: ") == lines


def test_the_short_report_lists_other_causes() -> None:
    base = diagnosis()
    second = replace(base.findings[0], rule="slow-logger", confidence=Confidence.POSSIBLE)
    assert "  also possible: slow-logger (rank 0)" in render_short(replace(base, findings=(*base.findings, second)))


def on_rank(rank: int, summary: str = "Rank {} is stopped by a signal, for 4{} s.") -> Finding:
    return replace(diagnosis().findings[0], ranks=(rank,), summary=summary.format(rank, rank), location="")


def test_equal_findings_of_many_ranks_are_listed_once() -> None:
    base = replace(diagnosis(), findings=tuple(map(on_rank, range(4, 100))))
    text = render_text(base)
    assert text.count("is stopped by a signal") == 2  # as the answer, and with its evidence
    assert "   The same was found for ranks 5-99; report.json lists each.\n" in text
    assert "  same for: ranks 5-99" in render_short(base).splitlines()
    assert "also possible" not in render_short(base)


@pytest.mark.parametrize(
    "second",
    [
        on_rank(5, "Rank {}: the logs at /b cannot be used."),
        on_rank(4, "Rank {}: the logs at /a cannot be used, either, {}."),
        replace(on_rank(5, "Rank {}: the logs at /a cannot be used."), location="/a/train.py:5 in fit"),
        replace(on_rank(5, "Rank {}: the logs at /a cannot be used."), remedy="Look at its host."),
    ],
    ids=["other words", "same rank", "other line", "other remedy"],
)
def test_slightly_different_findings_are_all_listed(second: Finding) -> None:
    first = on_rank(4, "Rank {}: the logs at /a cannot be used.")
    text = render_text(replace(diagnosis(), findings=(first, second)))
    assert f"   {second.summary}\n" in text and "The same was found" not in text


def test_two_findings_of_one_rank_are_both_listed() -> None:
    first = on_rank(4, "Rank {} has called 61 of group 1.")
    second = replace(first, summary="Rank 4 has called 62 of group 2.")
    text = render_text(replace(diagnosis(), findings=(first, second)))
    assert first.summary in text and second.summary in text and "The same was found" not in text


AT_LIMIT = replace(
    diagnosis(),
    job=replace(diagnosis().job, incident=replace(diagnosis().job.incident, kind=IncidentKind.TIMEOUT, idle_s=1800)),
)


def test_only_news_about_the_same_cause_is_reported() -> None:
    later = replace(AT_LIMIT.findings[0], summary="Rank 0 is working alone, for 1,818 s.")
    other = replace(later, rule="slow-logger", confidence=Confidence.POSSIBLE, summary="Rank 0 writes logs.")
    told = render_news(replace(AT_LIMIT, findings=(later, other)), diagnosis().findings)
    assert told.splitlines() == [
        "still rank-zero-only-work after 30 min, the limit: rank 0 at /home/me/train.py:73 in evaluate",
        "  also possible now: slow-logger: Rank 0 writes logs.",
    ]
    assert len(render_news(AT_LIMIT, (later, other)).splitlines()) == 1


@pytest.mark.parametrize("change", [{"rule": "slow-logger"}, {"ranks": (1,)}])
def test_another_cause_is_reported_in_full(change: dict[str, Any]) -> None:
    known = replace(diagnosis().findings[0], **change)
    assert render_news(AT_LIMIT, (known,)) == render_short(AT_LIMIT)


def test_without_earlier_findings_everything_is_news() -> None:
    assert render_news(AT_LIMIT, ()) == render_short(AT_LIMIT)
    nothing = replace(AT_LIMIT, findings=())
    assert render_news(nothing, diagnosis().findings) == render_short(nothing)


def test_without_a_finding_the_report_shows_what_ranks_do() -> None:
    nothing = replace(diagnosis(), findings=())
    expected = "Nothing found: no rank waits for another; ranks 0-2 at work: batch 118 of epoch 2."
    assert render_short(nothing).splitlines()[0] == expected
    assert render_text(nothing).splitlines()[0] == expected


def test_a_report_without_facts_is_written() -> None:
    job = replace(diagnosis().job, ranks=(), witnessed=())
    text = render_text(replace(diagnosis(), job=job, findings=(), unanswered=()))
    assert text.startswith("Nothing found: no rank answered.")


EVIL = "\x1b[2J\x1b]0;owned\x07\r\n\x00\x9b31m\u202e\u2028\ud800"


@pytest.mark.parametrize("render", [render_text, render_short])
def test_escape_codes_in_facts_are_escaped(render: object) -> None:
    evil = with_first(
        summary=f"Rank 0 {EVIL}",
        location=f"{EVIL}:1 in f",
        remedy=EVIL,
        evidence=(Evidence(source=EVIL, text=EVIL),),
    )
    stack = (Frame(file=EVIL, line=1, function=EVIL, code=EVIL, user=True, rank_condition=EVIL),)
    raised = ExceptionFacts(type=EVIL, message=EVIL, stack=stack)
    ranks = (replace(facts(0), stack=stack), replace(facts(1), exception=raised))
    evil = replace(evil, job=replace(evil.job, ranks=ranks), unanswered=(EVIL,))
    text = render(evil)  # type: ignore[operator]
    assert not [char for char in text if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]
    assert not {"\u202e", "\u2028", "\ud800"} & set(text)
    assert "\\x1b[2J" in text
    text.encode()


def test_safe_keeps_harmless_text() -> None:
    assert safe("Zoë's naïve 模型: 3 µs\n  next line") == "Zoë's naïve 模型: 3 µs next line"


def test_a_thousand_ranks_fit_in_a_few_screens() -> None:
    big = diagnosis(world=1024, silent=(3,))
    lines = render_text(big).splitlines()
    assert len(lines) < 60
    assert "Ranks 1-2, 4-1023: wait in broadcast;" in render_text(big)


def test_a_thousand_different_ranks_are_truncated() -> None:
    different = tuple(
        replace(facts(rank), stack=(Frame(file="a.py", line=rank + 1, function="f", user=True),)) for rank in range(900)
    )
    big = replace(diagnosis(), job=replace(diagnosis().job, ranks=different, world_size=1024))
    text = render_text(big)
    assert len(text.splitlines()) < 250
    assert "more different stacks are in report.json" in text


def test_ranks_that_a_finding_names_come_first_and_are_never_left_out() -> None:
    different = tuple(replace(facts(1), rank=rank, stack=(frame(rank + 1),)) for rank in range(900))
    job = replace(diagnosis().job, ranks=different, witnessed=(), world_size=900)
    named = replace(diagnosis().findings[0], ranks=(899,))
    lines = render_text(replace(diagnosis(), job=job, findings=(named,))).splitlines()
    table = lines[lines.index("All ranks") + 2 :]
    assert table[0].startswith("Rank 899: ") and any(line.startswith("Rank 0: ") for line in table)
    assert "… 860 more lines are in report.json" in table


def test_ranks_of_several_hosts_are_told_with_their_hosts() -> None:
    assert "; on " not in render_text(diagnosis())
    text = render_text(diagnosis(world=16, silent=()))
    assert "\nRank 0: is in user code; no progress for 20 s; on node-0; phase train" in text
    assert "; on node-0, node-1; phase train" in text
    assert "; on 128 hosts; phase train" in render_text(diagnosis(world=1024, silent=(3,)))
    assert "1,023 of 1,024 ranks answered." in render_text(diagnosis(world=1024, silent=(3,)))


def frame(line: int) -> Frame:
    return Frame(file="a.py", line=line, function="f", user=True)


def test_ranks_that_are_silent_alike_share_a_line() -> None:
    text = render_text(diagnosis(world=300, silent=tuple(range(4, 300))))
    assert "\nRanks 4-299: did not answer; their processes are stopped\n" in text
    assert text.count("did not answer;") == 1


def test_a_recorded_rank_has_a_line_for_each_of_its_groups() -> None:
    many = [Group(name=str(name), ranks=(0, 1), last_enqueued=1_234, last_completed=1_233) for name in range(5)]
    call = Collective(group="2", seq=1_234, op="all_reduce", backend="nccl")
    record = RecordFacts(has_dump=True)
    ranks = [
        RankFacts(
            rank=n, progress=Progress(phase=Phase.UNKNOWN), groups=tuple(many), collectives=(call,), record=record
        )
        for n in (0, 1)
    ]
    job = replace(diagnosis().job, ranks=tuple(ranks), world_size=2)
    job = replace(job, incident=replace(job.incident, kind=IncidentKind.RECORDED, opened_ns=1_795_794_732_293_934_936))
    text = render_text(replace(diagnosis(), job=job))
    assert "Read 2 of 2 ranks: dumps of ranks 0-1. The last call that was recorded was made on 27 November" in " ".join(
        text.split()
    )
    assert (
        "\nRanks 0-1:\n- group '2': called 1,234, completed 1,233, wait in all_reduce (sequence number 1234)\n"
        "- the default group: called 1,234, completed 1,233\n" in text
    )
    assert "\n- 1 more group\n" in text


def test_what_several_ranks_observed_alike_is_told_once() -> None:
    alike = [Evidence(source="stack", rank=rank, text="Is in a collective.") for rank in (1, 2, 3)]
    told = with_first(evidence=(*alike, Evidence(source="stack", rank=0, text="Is in user code.")))
    text = render_text(told)
    assert text.count("Is in a collective.") == 1 and "   - [stack, ranks 1-3] Is in a collective.\n" in text
    assert "  because: [stack, ranks 1-3] Is in a collective." in render_short(told).splitlines()


def test_the_report_says_when_it_was_and_in_which_job() -> None:
    base = diagnosis()
    assert "That was" not in render_text(base)
    opened = replace(base.job.incident, opened_ns=1_795_794_732_293_934_936)
    told = render_text(replace(base, job=replace(base.job, incident=opened, launch="SLURM job 4711")))
    assert "That was on 27 November 2026, 15:52:12 UTC, in SLURM job 4711." in " ".join(told.split())


def test_a_rank_that_raised_did_not_stand_still_and_its_stack_is_that_of_the_exception() -> None:
    base = diagnosis()
    raised = ExceptionFacts(type="KeyError", message="'label'", stack=(Frame(file=LIBRARY, line=9, function="read"),))
    now = replace(facts(0), progress=replace(facts(0).progress, idle_s=0.0), exception=raised)
    text = render_text(replace(base, job=replace(base.job, ranks=(now, *base.job.ranks[1:]))))
    assert "Rank 0: raised KeyError; phase train, batch 118 of epoch 2" in text
    title = "Stack of rank 0, where KeyError was raised"
    assert f"\n{title}\n{'-' * len(title)}\n  torch/utils/data.py:9 in read\n(Outermost call first." in text
    assert text.count("> marks your own code") == 1


LIBRARY = "/home/me/venv/lib/python3.11/site-packages/torch/utils/data.py"


@pytest.mark.parametrize("width", range(40, 61))
def test_a_number_and_its_unit_stay_on_one_line(width: int) -> None:
    text = "It has waited for 4 min 12 s with 310.7 MB resident, growing by 3.4 MB/s, in 39 % of 2 h 5 min, 1 m away."
    lines = wrapped(text, width=width).splitlines()
    assert " ".join(lines) == text and max(map(len, lines)) <= width
    assert not any(re.match(r"(?:min|s|h|MB|%|12 s|5 min)\b", line) for line in lines[1:])


def test_a_deep_stack_is_truncated() -> None:
    deep = tuple(Frame(file="a.py", line=1, function=f"f{depth}") for depth in range(900))
    job = replace(diagnosis().job, ranks=(replace(facts(0), stack=deep),))
    text = render_text(replace(diagnosis(), job=job))
    assert "outer frames" in text and "in f899" in text and "in f1\n" not in text


def test_that_the_jobs_store_is_gone_with_a_rank_is_no_news() -> None:
    no_store = "The job's store cannot be used: DistNetworkError: Failed to recv."
    one = diagnosis()
    for state, is_told in (("gone", False), ("sleeping", True)):
        job = replace(one.job, witnessed=(ProcessFacts(pid=4003, rank=3, state=state),), missing=(no_store,))
        answer = render_short(replace(one, job=job, unanswered=(no_store, "Gloo does not report …")))
        assert (f"not known: {no_store}" in answer) is is_told
        assert "Gloo" not in answer
        assert no_store in render_text(replace(one, job=job, unanswered=(no_store,)))
