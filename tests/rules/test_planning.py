"""What the next start is to do: never a stop for a machine's fault, never a restart for wrong code, no host in vain."""

from dataclasses import replace
from typing import Any

import pytest
from builders import BARRIER, GLOO, NCCL, RUN, Backend, job, user
from call_scenes import CALL_SCENES
from machine_scenes import MACHINE_SCENES
from scenes import SCENES as OTHER_SCENES
from scenes import Scene, a_logger_sends_at_the_end, logger_flushes
from whose_fault import OF_CODE, OF_EITHER, OF_MACHINE

from lightning_ncclsafe.cli.explain import RULES
from lightning_ncclsafe.facts import (
    CaughtException,
    ChildProcess,
    Frame,
    Incident,
    IncidentKind,
    JobFacts,
    MainThreadFacts,
    Phase,
    SilentHost,
)
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding, NextStart, Plan, Severity
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit import Rule
from lightning_ncclsafe.rules.planning import is_same, next_start

SCENES = (*OTHER_SCENES, *CALL_SCENES, *MACHINE_SCENES)
DECIDES = {Plan.STOP, Plan.RESTART, Plan.RESTART_WITHOUT_HOST}


def at_the_limit(job: JobFacts, **changes: Any) -> JobFacts:
    return replace(job, incident=replace(job.incident, kind=IncidentKind.TIMEOUT), **changes)


def plan_of(facts: JobFacts) -> NextStart:
    found = next_start(judge(at_the_limit(facts)))
    assert found is not None
    return found


def found(rule: str, plan: Plan, confidence: Confidence = Confidence.LIKELY, *ranks: int) -> Finding:
    return Finding(
        rule=rule, summary=f"It is {rule}.", ranks=ranks or (0,), remedy="Look.", confidence=confidence, plan=plan
    )


def planned(*findings: Finding, kind: IncidentKind = IncidentKind.TIMEOUT) -> NextStart | None:
    facts = job(*(GLOO.waiting(rank, seq=61) for rank in range(2)), world=2)
    facts = replace(facts, incident=Incident(number=3, kind=kind, opened_by=0, opened_ns=7), launch="torchrun job")
    return next_start(Diagnosis(job=facts, findings=findings))


@pytest.mark.parametrize("backend", (GLOO, NCCL), ids=lambda backend: backend.name)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_no_scene_is_planned_against_whose_fault_it_is(scene: Scene, backend: Backend) -> None:
    start = plan_of(scene.build(backend))
    assert start.rule == scene.rule
    if scene.rule in OF_CODE:
        assert start.plan in (Plan.STOP, Plan.UNKNOWN)
    elif scene.rule in OF_MACHINE:
        assert start.plan is not Plan.STOP
    elif scene.rule not in OF_EITHER:
        assert start.plan in (Plan.RESTART, Plan.UNKNOWN)
    assert bool(start.hosts) is (start.plan is Plan.RESTART_WITHOUT_HOST)


def test_most_faults_of_the_code_are_a_stop_and_most_of_a_machine_a_restart() -> None:
    """Else all of them could be unknown, and no test would notice."""
    plans = {(scene.rule, plan_of(scene.build(GLOO)).plan) for scene in SCENES}
    # Of the second it is as likely in its scene that a link is broken.
    doubtful = {"unpresented-loader", "different-trainer-settings"}
    assert {rule for rule in OF_CODE if (rule, Plan.STOP) in plans} >= OF_CODE - doubtful
    assert len({rule for rule, plan in plans if rule in OF_MACHINE and plan in DECIDES}) >= len(OF_MACHINE) - 4


def test_every_rule_that_decides_by_itself_says_on_what() -> None:
    for rule in (rule for rules in RULES.values() for rule in rules):
        assert rule.plan_words in {plan.value for plan in Plan} or "``" in rule.plan_words, rule


def test_the_first_cause_decides() -> None:
    start = planned(found("one", Plan.STOP, Confidence.CERTAIN), found("other", Plan.RESTART))
    assert start is not None
    assert (start.plan, start.rule, start.answer) == (Plan.STOP, "one", "It is one.")
    assert (start.incident, start.launch, start.opened_ns) == (3, "torchrun job", 7)


@pytest.mark.parametrize("plan", [Plan.STOP, Plan.RESTART])
def test_a_mere_possibility_decides_nothing(plan: Plan) -> None:
    start = planned(found("one", plan, Confidence.POSSIBLE))
    assert start is not None and (start.plan, start.rule) == (Plan.UNKNOWN, "one")


@pytest.mark.parametrize("others", [(Plan.STOP, Plan.RESTART), (Plan.RESTART, Plan.STOP)])
def test_two_causes_as_sure_that_contradict_each_other_decide_nothing(others: tuple[Plan, ...]) -> None:
    start = planned(*(found(plan.value, plan) for plan in others))
    assert start is not None and start.plan is Plan.UNKNOWN


def test_nothing_found_at_the_limit_is_unknown() -> None:
    start = planned()
    assert start is not None and (start.plan, start.rule, start.answer) == (Plan.UNKNOWN, "", "")


@pytest.mark.parametrize("kind", [IncidentKind.SUSPECT, IncidentKind.RECORDED, IncidentKind.DATA])
def test_a_run_that_goes_on_or_is_long_over_has_no_next_start(kind: IncidentKind) -> None:
    assert planned(found("one", Plan.STOP), kind=kind) is None


def test_a_refused_start_has_one() -> None:
    facts = job(*(GLOO.waiting(rank, seq=61) for rank in range(2)), world=2)
    facts = replace(facts, incident=replace(facts.incident, kind=IncidentKind.DATA))
    error = replace(found("uneven-batches", Plan.STOP), severity=Severity.ERROR)
    start = next_start(Diagnosis(job=facts, findings=(found("same-shard", Plan.UNKNOWN), error)), is_refused=True)
    assert start is not None and start.plan is Plan.STOP


def on_hosts(facts: JobFacts, *names: str) -> JobFacts:
    return replace(facts, ranks=tuple(replace(one, host=names[one.rank]) for one in facts.ranks))


@pytest.mark.parametrize(
    ("hosts", "plan", "without"),
    [
        (("a", "a", "b", "b"), Plan.RESTART_WITHOUT_HOST, ("b",)),
        (("a", "a", "a", "a"), Plan.RESTART, ()),
        (("a", "a", "", "b"), Plan.RESTART, ()),
    ],
    ids=["its host", "the only host", "an unknown host"],
)
def test_only_the_host_at_fault_is_left_out(hosts: tuple[str, ...], plan: Plan, without: tuple[str, ...]) -> None:
    facts = at_the_limit(on_hosts(job(*(NCCL.waiting(rank, seq=61) for rank in range(4)), world=4), *hosts))
    at_fault = found("gpu-stuck", Plan.RESTART_WITHOUT_HOST, Confidence.LIKELY, 2)
    start = next_start(Diagnosis(job=facts, findings=(at_fault,)))
    assert start is not None and (start.plan, start.hosts) == (plan, without)


@pytest.mark.parametrize(
    ("answering", "plan", "without"),
    [(("a", "b"), Plan.RESTART_WITHOUT_HOST, ("c",)), (("a",), Plan.RESTART, ())],
    ids=["two of three answer", "each may blame the other"],
)
def test_a_host_is_gone_where_most_others_answer(
    answering: tuple[str, ...], plan: Plan, without: tuple[str, ...]
) -> None:
    ranks = [replace(GLOO.waiting(rank, seq=61), host=host) for rank, host in enumerate(answering)]
    lost = SilentHost(
        host="c", ranks=(len(ranks),), address="10.0.0.3", answers=False, seen_from="a", tried="no answer"
    )
    start = plan_of(replace(job(*ranks, world=len(ranks) + 1), silent_hosts=(lost,)))
    assert (start.rule, start.plan, start.hosts) == ("unreachable-host", plan, without)


def test_starts_are_the_same_by_cause_step_and_job() -> None:
    start = NextStart(plan=Plan.UNKNOWN, rule="gil-held", step=12, launch="SLURM job 1")
    assert is_same(start, replace(start, incident=4, opened_ns=9))
    for other in (replace(start, step=13), replace(start, rule="data-stall"), replace(start, launch="SLURM job 2")):
        assert not is_same(start, other)
    nameless = replace(start, rule="")
    assert not is_same(nameless, nameless)


def test_a_plan_that_depends_is_asked_of_the_job() -> None:
    rule: Rule[Any] = next(rule for rule in RULES["Why ranks wait"] if rule.name == "dead-rank")
    assert "unknown" in rule.plan_words and not isinstance(rule.plan, Plan)


@pytest.mark.parametrize(
    ("thread", "plan"),
    [
        (MainThreadFacts(over_s=8.8, state="sleeping", looks=9, running_looks=1), Plan.RESTART),
        (MainThreadFacts(over_s=8.8, state="running", looks=9, running_looks=9), Plan.UNKNOWN),
        (None, Plan.RESTART),
    ],
    ids=["waits", "computes", "unknown"],
)
def test_a_logger_that_computes_may_do_the_same_after_a_restart(thread: MainThreadFacts | None, plan: Plan) -> None:
    facts = logger_flushes(GLOO)
    ranks = (
        replace(one, machine=replace(one.machine, main_thread=thread)) if one.rank == 0 else one for one in facts.ranks
    )
    first = judge(replace(facts, ranks=tuple(ranks))).findings[0]
    assert (first.rule, first.plan) == ("slow-logger", plan)


def test_a_logger_that_waits_for_its_own_process_may_do_the_same_after_a_restart() -> None:
    facts = a_logger_sends_at_the_end(GLOO)
    join = Frame(file="/usr/lib/python3.12/multiprocessing/process.py", line=149, function="join")
    child = ChildProcess(pid=77, parent=1000)
    ranks = (
        replace(one, awaited_processes=(child,), stack=(*one.stack, join)) if one.rank == 0 else one
        for one in facts.ranks
    )
    first = judge(replace(facts, ranks=tuple(ranks))).findings[0]
    assert (first.rule, first.plan) == ("slow-logger", Plan.UNKNOWN)
    assert judge(facts).findings[0].plan is Plan.RESTART


def test_a_call_of_the_trainer_within_its_own_call_recurs_unless_an_error_may_have_led_the_others_past_it() -> None:
    stack = (user("on_fit_end", 54), RUN, BARRIER)
    options = {"phase": Phase.TEST, "batch": -1, "epoch": 1, "world": 2, "action": "[Callback]Best.on_fit_end"}
    again = GLOO.rank(0, *stack, seq=61, outstanding=1, **options)
    ended = GLOO.finished(1, seq=60, batch=-1, epoch=1, world=2)
    full = CaughtException(type="OSError", message="No space left on device", stack=(user("on_fit_end", 50),))
    for other, plan in ((ended, Plan.STOP), (replace(ended, caught=(full,)), Plan.UNKNOWN)):
        start = plan_of(job(again, other, world=2))
        assert (start.rule, start.plan) == ("unfinished-rank", plan)
