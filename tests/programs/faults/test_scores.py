"""The arithmetic of the scoreboard, the truths and how they are compared: nothing is trained here."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recorded
import running
import scoreboard
import truths
from catalogue import CASES
from running import Outcome, run_case
from scores import (
    UNREHEARSED,
    Score,
    calibration,
    exit_code,
    planned,
    plans,
    row,
    rows,
    score_fault,
    score_healthy,
)
from truths import Case, Moment, Scenario
from whole_programs import whole_programs

from lightning_ncclsafe.facts import Incident, IncidentKind, JobFacts, Phase, ProcessFacts, Progress, RankFacts
from lightning_ncclsafe.facts.codec import from_plain
from lightning_ncclsafe.facts.findings import Diagnosis, NextStart, Plan
from lightning_ncclsafe.report.json import report_json
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge

JOB = JobFacts(
    incident=Incident(number=1, kind=IncidentKind.SUSPECT, opened_by=0),
    world_size=2,
    ranks=(RankFacts(rank=0, progress=Progress(phase=Phase.TRAIN, idle_s=3.0)),),
    witnessed=(ProcessFacts(pid=7, rank=1, state="gone"),),
)


def stalls(_: object) -> None:
    raise TimeoutError  # <- here


_SOURCE = Path(__file__).resolve().read_text().splitlines()
_NUMBER = next(number for number, line in enumerate(_SOURCE, 1) if line.startswith("    raise TimeoutError"))
LINE = f"{Path(__file__).resolve()}:{_NUMBER} "
SCENARIO = Scenario(name="stalls", run=stalls, causes=("data-stall",), ranks=(-1,), at={Moment.MIDDLE: (3,)})
CASE = Case(scenario=SCENARIO, world_size=3, moment=Moment.MIDDLE)
HEALTHY = replace(CASE, scenario=replace(SCENARIO, causes=(), ranks=()))


def report(rule: str = "data-stall", ranks: tuple[int, ...] = (2,), **more: Any) -> dict[str, Any]:
    finding = {
        "rule": rule,
        "confidence": "likely",
        "ranks": [*ranks],
        "location": f"{LINE}in stalls",
        "summary": "It stalls.",
    }
    facts = [{"rank": rank, "progress": {"phase": "train"}} for rank in range(3)]
    return {"findings": [finding | more], "job": {"ranks": facts}}


def test_the_marked_line_is_that_of_the_source() -> None:
    assert CASE.place == LINE
    unmarked = replace(SCENARIO, run=test_a_case_has_its_ranks_counted_from_the_last)
    with pytest.raises(LookupError, match=r"stalls has 0 marked lines in test_scores\.py, not one"):
        truths.place_of(unmarked)


def spread(_: object) -> None:
    raise TimeoutError(
        "over several lines",
    )  # <- here


def drawn(rows: list[int]) -> None:
    while sum(
        rows,
    ):  # <- here
        rows.pop()


@pytest.mark.parametrize("run", [spread, drawn], ids=["a simple statement", "the head of a loop"])
def test_any_line_of_the_marked_statement_is_right(run: Callable[..., None]) -> None:
    case = replace(CASE, scenario=replace(SCENARIO, run=run))
    file, _, last = case.place.strip().rpartition(":")
    places = {offset: f"{file}:{int(last) + offset} in spread" for offset in range(-3, 2)}
    assert [offset for offset, place in places.items() if case.is_marked(place)] == [-2, -1, 0]
    assert score_fault(case, report(location=places[-1])).line_right
    assert score_fault(case, report(location=places[-3])).line_right is False


def test_a_case_has_its_ranks_counted_from_the_last() -> None:
    assert CASE.ranks == (2,)
    assert replace(CASE, scenario=replace(SCENARIO, ranks=None)).ranks == (0, 1, 2)


def test_a_right_verdict_is_right_in_everything() -> None:
    score = score_fault(CASE, report(), delay_s=2.5)
    assert score.is_right
    judged = (score.cause_right, score.ranks_right, score.line_right, score.phase_right)
    assert judged == (True, True, True, True)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        pytest.param(report("rank-behind"), "cause_right", id="cause"),
        pytest.param(report(ranks=(1, 2)), "ranks_right", id="ranks"),
        pytest.param(report(location=LINE.replace(" ", "0 ")), "line_right", id="line"),
        pytest.param(report(location=""), "line_right", id="no-line"),
    ],
)
def test_one_wrong_thing_is_seen(given: dict[str, Any], wrong: str) -> None:
    score = score_fault(CASE, given)
    assert not score.is_right
    checks = ("cause_right", "ranks_right", "line_right", "phase_right")
    assert [name for name in checks if not getattr(score, name)] == [wrong]


def test_the_line_at_which_it_was_decided_is_told_and_makes_nothing_right() -> None:
    elsewhere = LINE.replace(" ", "0 ")
    score = score_fault(CASE, report(location=elsewhere, decided_at=LINE))
    assert (score.line_right, score.line_told, score.is_right) == (False, True, False)
    assert score_fault(CASE, report(location=elsewhere, decided_at=elsewhere)).line_told is False
    assert score_fault(CASE, report()).line_told is True


def test_another_phase_is_seen_and_that_of_a_silent_rank_is_not_judged() -> None:
    other = report()
    other["job"]["ranks"][2]["progress"]["phase"] = "validate"
    assert score_fault(CASE, other).phase_right is False
    del other["job"]["ranks"][2]
    assert score_fault(CASE, other).phase_right is None


def test_no_report_and_one_without_findings_are_wrong() -> None:
    for none in (None, report() | {"findings": []}):
        score = score_fault(CASE, none, why_none="exit codes [0]")
        assert (score.cause_right, score.ranks_right, score.line_right) == (False, False, False)
        assert (score.named, score.answer) == ("", "exit codes [0]")


@pytest.mark.parametrize(
    ("whose", "plan", "hosts", "right"),
    [
        ("code", Plan.STOP, (), True),
        ("code", Plan.UNKNOWN, (), True),
        ("code", Plan.RESTART, (), False),
        ("code", Plan.RESTART_WITHOUT_HOST, ("c",), False),
        ("machine", Plan.STOP, (), False),
        ("machine", Plan.RESTART, (), True),
        ("machine", Plan.RESTART_WITHOUT_HOST, ("c",), True),
        ("machine", Plan.RESTART_WITHOUT_HOST, ("b", "c"), False),
        ("either", Plan.STOP, (), None),
        ("either", Plan.RESTART_WITHOUT_HOST, ("b",), False),
    ],
)
def test_a_plan_is_right_by_whose_fault_it_is(whose: str, plan: Plan, hosts: tuple[str, ...], right: bool) -> None:
    given = report()
    given["job"]["ranks"] = [facts | {"host": host} for facts, host in zip(given["job"]["ranks"], "abc", strict=True)]
    case = replace(CASE, scenario=replace(SCENARIO, whose=whose))
    score = score_fault(case, given, start=NextStart(plan=plan, hosts=hosts))
    assert (score.plan, score.plan_right, score.is_right) == (plan.value, right, right is not False)


def test_what_a_suspicion_would_plan_is_that_of_the_limit() -> None:
    facts = json.loads(report_json(judge(JOB)))
    start = planned(facts)
    assert start is not None and start.rule == facts["findings"][0]["rule"]
    none = planned(facts | {"findings": []})
    assert none is not None and none.plan is Plan.UNKNOWN


def test_causes_say_whose_fault_it_is_where_the_scenario_does_not() -> None:
    found = {name: scenario.fault_of for name, scenario in truths.SCENARIOS.items() if scenario.causes}
    assert (found["evaluation_on_rank_zero"], found["link_that_drops_packets"]) == ("code", "machine")
    assert {*found.values()} == {"code", "machine", "either"}
    assert sum(side == "either" for side in found.values()) < len(found) / 3


def test_plans_are_counted_by_whose_fault_it_was() -> None:
    scores = [replace(RIGHT, fault_of="code", plan="stop"), replace(RIGHT, fault_of="code", plan="unknown"), WELL]
    assert plans(scores) == {"code": {"stop": 1, "unknown": 1}, "machine": {}, "either": {}}


def test_a_healthy_run_ends_on_all_ranks_and_says_that_it_watches() -> None:
    said = ["[ncclsafe] watching 3 ranks"]
    assert score_healthy(HEALTHY, None, [0, 0, 0], said, started=3).is_right
    assert score_healthy(HEALTHY, report(), [0, 0, 0], said, started=3).false_alarm
    assert score_healthy(HEALTHY, None, [0, 0, 0], [*said, "[ncclsafe] recovered after 3 s"], started=3).false_alarm
    assert score_healthy(HEALTHY, None, [0, 0, 1], said, started=3).false_alarm
    assert score_healthy(HEALTHY, None, [0, 0], said, started=3).false_alarm


RIGHT = Score(case="a", causes=("data-stall",), cause_right=True, ranks_right=True, delay_s=2.0)
MISSED = Score(case="b", causes=("data-stall", "rank-behind"), cause_right=False, ranks_right=True, delay_s=4.0)
WELL = Score(case="c", causes=(), false_alarm=False)
LOUD = Score(case="d", causes=(), false_alarm=True)
SKIPPED = Score(case="e", causes=("dead-rank",), skipped="no namespaces")


def test_sums_count_what_was_judged_and_nothing_else() -> None:
    total = row("in total", [RIGHT, MISSED, WELL, LOUD, SKIPPED])
    assert (total.scores, total.skipped) == (4, 1)
    assert (total.cause, total.ranks, total.line, total.false_alarms) == ((1, 2), (2, 2), (0, 0), (1, 2))
    assert (total.median_s, total.longest_s) == (3.0, 4.0)


def test_rows_are_by_the_first_cause_then_the_healthy_then_all() -> None:
    found = rows([WELL, MISSED, SKIPPED, RIGHT])
    assert [one.name for one in found] == ["data-stall", "dead-rank", "healthy", "in total"]
    assert [one.scores for one in found] == [2, 0, 1, 3]


def test_those_from_public_threads_have_a_row_of_their_own() -> None:
    found = rows([WELL, replace(WELL, is_unrehearsed=True), replace(MISSED, is_unrehearsed=True), RIGHT])
    assert [one.name for one in found] == ["data-stall", "healthy", UNREHEARSED, "in total"]
    assert (found[-2].scores, found[-2].entirely, found[-1].entirely) == (1, (0, 1), (1, 2))


def test_answers_are_counted_by_how_sure_they_say_to_be() -> None:
    sure = replace(RIGHT, confidence="certain", phase_right=False)
    wrong_line = replace(sure, line_right=False)
    alarm = replace(LOUD, confidence="possible")
    counted = calibration([sure, wrong_line, alarm, WELL, MISSED, replace(SKIPPED, confidence="certain")])
    assert counted == {"certain": (1, 2), "likely": (0, 0), "possible": (0, 1)}
    assert score_fault(CASE, report()).confidence == "likely"


@pytest.mark.parametrize(
    ("scores", "code"),
    [
        pytest.param([RIGHT, WELL, SKIPPED], 0, id="all-right"),
        pytest.param([RIGHT, MISSED], 1, id="missed"),
        pytest.param([RIGHT, LOUD], 1, id="false-alarm"),
        pytest.param([SKIPPED], 1, id="nothing-run"),
    ],
)
def test_the_exit_code_tells_whether_all_was_right(scores: list[Score], code: int) -> None:
    assert exit_code(scores) == code


def test_what_is_wrong_is_told_in_a_line() -> None:
    assert scoreboard.line_of(replace(MISSED, named="slow-logger", answer="Rank 0 …")) == (
        "b: named slow-logger, not data-stall or rank-behind: Rank 0 …"
    )
    assert scoreboard.line_of(replace(RIGHT, line_right=False)) == "a: line wrong: "
    assert ": not quiet: " in scoreboard.line_of(LOUD)


def test_every_case_has_one_marked_line_and_fitting_ranks() -> None:
    assert len({case.scenario.name for case in CASES.values()}) == len(truths.SCENARIOS)
    for case in (*CASES.values(), *whole_programs()):
        assert bool(case.place) == case.scenario.has_line
        assert {*case.ranks} <= {*range(case.world_size)}
        assert bool(case.ranks) == (not case.is_healthy and case.scenario.has_ranks)


def test_a_whole_program_names_known_causes_and_starts_with_a_file_of_its_own() -> None:
    cases, names = whole_programs(), {rule.name for rule in (*HANG_RULES, *AGREEMENT_RULES)}
    assert len(cases) >= 28
    for case in cases:
        program = case.scenario.program
        assert program is not None and Path(program.argv[0]).parent == program.folder
        assert program.launcher in running.LAUNCHERS
        assert {*case.scenario.causes} <= names
        assert case.scenario.source.startswith("https://")


def test_there_are_enough_of_them() -> None:
    well = {case.scenario.name for case in CASES.values() if case.is_healthy}
    assert len(well) >= 15
    assert len(truths.SCENARIOS) - len(well) >= 40


@pytest.mark.parametrize("rule", [rule.name for rule in HANG_RULES])
def test_every_cause_of_a_hang_has_a_case(rule: str) -> None:
    every = [*CASES.values(), *recorded.recorded_cases()]
    assert any(rule in case.scenario.causes for case in every)


def test_names_choose_cases() -> None:
    assert {case.scenario.name for case in scoreboard.chosen(["worker-died"], "SafeDDP")} >= {"killed_worker"}
    assert all(case.is_healthy for case in scoreboard.chosen(["healthy"], "SafeDDP"))
    with pytest.raises(SystemExit, match="nothing-like-it with SafeDDP"):
        scoreboard.chosen(["nothing-like-it"], "SafeDDP")


def test_recordings_say_that_they_are_constructed() -> None:
    files = [json.loads(path.read_text()) for path in recorded.RECORDINGS.glob("*.json")]
    assert len(files) >= 20
    assert all(file["made"] == "constructed" for file in files)


def test_a_recording_is_read_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RECORDINGS", tmp_path)
    path = recorded.write("silence", ("dead-rank",), (1,), JOB)
    assert from_plain(JobFacts, json.loads(path.read_text())["job"]) == JOB
    (case,) = recorded.recorded_cases()
    assert (case.ranks, case.world_size) == ((1,), 2)
    assert recorded.score_recording(case).named == "dead-rank"


NEEDS_GLOO = "RuntimeError: No backend type associated with device type cpu\n"
WARM: Any = None
Envs = list[dict[str, str]]


def run_with(monkeypatch: pytest.MonkeyPatch, *outputs: str, on_gpu: bool = True) -> tuple[Outcome, list[Envs]]:
    """A case whose ranks say this each time that it is run, and what each of them is told."""
    told: list[Envs] = []
    said: Iterator[str] = iter(outputs)

    def in_environments(run: Any, environments: running.Environments) -> Outcome:
        assert (run.case, run.options) == (CASE, ["SafeDDP", "2.0"])
        with environments as envs:
            told.append(envs)
        return Outcome(output=next(said))

    monkeypatch.setattr(running.Run, "in_environments", in_environments)
    return run_case(WARM, CASE, on_gpu=on_gpu), told


def backends(told: list[Envs]) -> list[set[str]]:
    return [{env["GPU_BACKEND"] for env in envs} for envs in told]


def test_ranks_on_a_gpu_are_told_how_to_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, told = run_with(monkeypatch, "fine\n")
    (envs,) = told
    assert outcome.output == "fine\n"
    assert [env["NCCL_HOSTID"] for env in envs] == ["fake0", "fake1", "fake2"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "2"]
    assert backends(told) == [{"nccl"}]


def test_ranks_on_cpus_are_told_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, told = run_with(monkeypatch, NEEDS_GLOO, on_gpu=False)
    assert [len(envs) for envs in told] == [3]
    assert not any({"NCCL_HOSTID", "GPU_BACKEND", "CUDA_VISIBLE_DEVICES"} & env.keys() for env in told[0])


@pytest.mark.parametrize("second", ["fine\n", NEEDS_GLOO])
def test_a_case_that_reduces_on_cpus_is_run_again_with_gloo_beside_nccl(
    second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, told = run_with(monkeypatch, f"[rank1]: {NEEDS_GLOO}", second)
    assert outcome.output == second
    assert backends(told) == [{"nccl"}, {"cpu:gloo,cuda:nccl"}]


def kept_of(outcome: Outcome, monkeypatch: pytest.MonkeyPatch, reports: Path | None, **where: bool) -> dict[str, Any]:
    """How the scoreboard has run a case with this outcome."""
    how: dict[str, Any] = {}

    def run(warm: Any, case: Case, **options: Any) -> Outcome:
        how.update(options)
        return outcome

    monkeypatch.setattr(scoreboard, "run_case", run)
    chosen = scoreboard.Options(strategy="SafeFSDP", suspect_after_s=3.0, reports=reports, **where)
    scoreboard.judged(WARM, CASE, chosen)
    return how


def test_the_report_and_the_output_of_a_case_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, folder = Outcome(report=json.loads(report_json(judge(JOB))), output="one\ntwo\n"), tmp_path / "kept"
    kept_of(outcome, monkeypatch, folder)
    log, kept = folder / f"{CASE.name}.log", folder / f"{CASE.name}.json"
    assert {*folder.iterdir()} == {log, kept}
    assert (log.read_text(), json.loads(kept.read_text())) == (outcome.output, outcome.report)


def test_a_kept_report_is_judged_anew_but_for_what_ranks_agree_on(tmp_path: Path) -> None:
    case = recorded.recorded_cases()[0]
    file = json.loads((recorded.RECORDINGS / f"{case.scenario.name}.json").read_text())
    job, path = from_plain(JobFacts, file["job"]), tmp_path / "kept.json"
    path.write_bytes(report_json(Diagnosis(job=job, findings=())))
    assert recorded.score_report(case, path) == recorded.score_recording(case)
    agreed = replace(job, incident=replace(job.incident, kind=IncidentKind.DATA))
    path.write_bytes(report_json(Diagnosis(job=agreed, findings=())))
    assert recorded.score_report(case, path).answer == "no finding"


def test_without_a_report_only_the_output_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_of(Outcome(output="no\n"), monkeypatch, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(f"{CASE.name}.log", "no\n")]


@pytest.mark.parametrize(
    "where",
    [{}, {"on_gpu": True}, {"on_hosts": True}, {"launcher": "torchrun"}, {"has_defaults": True}],
    ids=str,
)
def test_cases_are_run_as_the_scoreboard_was_told(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how = kept_of(Outcome(output="no\n"), monkeypatch, None, **where)
    usual = {"strategy": "SafeFSDP", "suspect_after_s": 3.0, "on_gpu": False, "on_hosts": False}
    usual |= {"launcher": "", "has_defaults": False}
    assert how == usual | where
    assert not [*tmp_path.iterdir()]


def test_what_is_kept_of_a_case_is_called_like_it() -> None:
    assert not [name for name in CASES if Path(name).suffix or "/" in name]
