"""A checkpoint that some ranks save after their call of the Trainer, while the others have left or are elsewhere."""

from dataclasses import replace

import pytest
from builders import BARRIER, CHECKPOINT_IO, FETCH, GLOO, MAIN, RUN, SITE, job, process, raised, user

from lightning_ncclsafe.facts import Frame, IncidentKind, JobFacts, Phase, ProcessFacts, RankFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding, Severity
from lightning_ncclsafe.rules.expected_waits import saved_together_for_s
from lightning_ncclsafe.rules.judging import judge

SAVE = Frame(file=f"{SITE}/lightning/pytorch/trainer/trainer.py", line=1464, function="save_checkpoint")
CONDITION = "if trainer.is_global_zero:  (line 41)"
LINE = user("main", 42, condition=CONDITION, code='trainer.save_checkpoint("last.ckpt")')
BARE = replace(LINE, rank_condition="")


def saving(rank: int, *stack: Frame, line: Frame = LINE, world: int = 2) -> RankFacts:
    """A rank that waits in the save's barrier, or is in these frames of the save."""
    facts = GLOO.in_barrier(rank, "Trainer.save_checkpoint", seq=61, phase=Phase.CHECKPOINT, world=world)
    return replace(facts, stack=(line, SAVE, *(stack or (BARRIER,))))


def cut_off(facts: RankFacts) -> RankFacts:
    """The same once the connection has broken: the main thread reports from the line that has called the save."""
    error = raised(facts, "RuntimeError", "Connection closed by peer [127.0.0.1]:31337", SAVE, consequence=True)
    return replace(error, stack=facts.stack[:1])


def judged(facts: RankFacts, seen: ProcessFacts | None) -> Finding:
    """The first answer about a job of two ranks, of which rank 1 has not called the save."""
    return judge(replace(job(facts, world=2, witnessed=(seen,) if seen else ()), absent=(1,))).findings[0]


@pytest.mark.parametrize("line", [LINE, BARE], ids=["condition", "no condition"])
def test_the_others_have_left(line: Frame) -> None:
    found = judged(cut_off(saving(0, line=line)), process(1, "gone", exit_code=0))
    assert (found.rule, found.ranks, found.confidence) == ("rank-zero-only-work", (0,), Confidence.CERTAIN)
    assert found.severity is Severity.ERROR, "the run cannot continue"
    assert found.location.endswith("train.py:42 in main")
    assert "Rank 0 has called trainer.save_checkpoint alone at train.py:42 in main" in found.summary
    assert ("under `if trainer.is_global_zero:` (line 41)" in found.summary) is (line is LINE)
    assert found.summary.endswith(
        "rank 0 waited until the connection broke. Rank 1 has left the program, with status 0."
    )
    assert found.remedy.startswith("Call trainer.save_checkpoint on all ranks")


def test_the_others_are_elsewhere() -> None:
    found = judged(saving(0), process(1, "sleeping", stack=(MAIN, user("plot", 60))))
    assert (found.rule, found.ranks, found.confidence) == ("rank-zero-only-work", (0,), Confidence.CERTAIN)
    assert found.severity is Severity.WARNING
    assert found.summary.endswith("Rank 1 has not called it: it is at train.py:60 in plot.")


def test_the_others_are_on_another_host() -> None:
    found = judged(saving(0), None)
    assert (found.rule, found.ranks, found.confidence) == ("rank-zero-only-work", (0,), Confidence.LIKELY)
    assert found.summary.endswith("Rank 1 has not called it.")


def test_without_a_condition_the_others_may_be_late() -> None:
    found = judged(saving(0, line=BARE), process(1, "sleeping", stack=(MAIN, user("plot", 40))))
    assert (found.rule, found.ranks) == ("late-at-init", (1,))


def test_a_rank_that_was_killed_has_not_left() -> None:
    found = judged(cut_off(saving(0)), process(1, "gone", ended_by="SIGKILL"))
    assert (found.rule, found.ranks) == ("dead-rank", (1,))


def test_a_rank_that_has_just_come_to_the_save_is_about_to_answer() -> None:
    findings = judge(
        replace(job(saving(0), world=2, witnessed=(process(1, "sleeping", stack=(LINE, SAVE)),)), absent=(1,))
    )
    assert "rank-zero-only-work" not in {found.rule for found in findings.findings}


def test_a_save_of_a_callback_is_another_matter() -> None:
    inside = replace(saving(0), stack=(BARE, RUN, SAVE, BARRIER))
    assert judged(inside, process(1, "gone", exit_code=0)).rule == "dead-rank"


def test_ranks_in_the_next_call_of_the_trainer_see_it_from_outside() -> None:
    others = (GLOO.in_barrier(rank, "pre_setup", seq=61, phase=Phase.INIT, batch=-1, world=3) for rank in (1, 2))
    seen = process(0, "sleeping", stack=(MAIN, LINE, SAVE, BARRIER))
    found = judge(replace(job(*others, world=3, witnessed=(seen,)), absent=(0,))).findings[0]
    assert (found.rule, found.ranks, found.confidence) == ("rank-zero-only-work", (0,), Confidence.CERTAIN)
    assert found.location.endswith("train.py:42 in main")
    assert "although it needs all ranks: ranks 1-2 wait in" in found.summary
    assert "has not called it" not in found.summary


def together(*ranks: RankFacts, **more: object) -> JobFacts:
    return job(*ranks, world=2, **more)  # type: ignore[arg-type]


def test_a_save_that_all_ranks_make_is_quiet_until_the_hard_limit() -> None:
    writing, waiting = saving(0, CHECKPOINT_IO, FETCH), saving(1)
    assert saved_together_for_s(together(writing, waiting)) == 1800.0 - 23.0
    assert saved_together_for_s(together(writing, waiting, kind=IncidentKind.TIMEOUT)) == 0.0


def test_a_save_that_not_all_ranks_make_is_not() -> None:
    elsewhere = GLOO.working(1, MAIN, user("plot", 60), seq=60, world=2)
    assert saved_together_for_s(together(saving(0), elsewhere)) == 0.0
    assert saved_together_for_s(together(saving(0))) == 0.0, "silent"
    assert saved_together_for_s(together(saving(0), cut_off(saving(1)))) == 0.0
