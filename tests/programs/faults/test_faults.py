"""The cheapest and most telling of the cases, as ``make faults`` judges them; and all recordings."""

from pathlib import Path

import pytest
from catalogue import CASES
from recorded import recorded_cases, score_recording
from running import LIMIT_S, Outcome, run_case
from scores import planned, score_fault, score_healthy
from truths import Case
from warm import Warm

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

FAULTS = [
    "evaluation_on_rank_zero-epoch-end-2",
    "exception_in_a_hook-validation-2",
    "killed_rank_zero-middle-3",
    "stopped_by_a_signal-middle-2",
    "storage_that_stops_without_workers-first-step-2",
    "barrier_on_rank_zero-epoch-end-2",
    "feeder_that_died-middle-2",
    "link_that_drops_packets-middle-2",
    "split_without_a_seed-start-3",
    "sums_of_unequal_length-first-step-2",
    "large_tensor_gathered_on_rank_zero-middle-3",
    "rate_found_on_rank_zero-start-2",
]
# Each rank is alone on its host, and its process cannot answer.
ON_HOSTS = "stopped_by_a_signal-middle-2 on hosts"
# What starts the ranks ends all of them as soon as one has failed.
LAUNCHED = ["killed_process-middle-3 by lightning", "exception_in_a_hook-validation-2 by torchrun"]
# The progress bar and checkpoints make calls of their own at the end of an epoch.
WITH_DEFAULTS = "logged_metric_with_a_class_fewer-epoch-end-2 with defaults"
HEALTHY = ["long_first_step-first-step-2", "early_stopping_on_all_ranks-epoch-end-2"]
# Those that take long wait first.
FIRST = [(name,) for name in [*HEALTHY, ON_HOSTS]]


def run_program(warm: Warm, folder: Path, name: str) -> Outcome:
    case, _, how = name.partition(" ")
    launcher = how.removeprefix("by ") if how.startswith("by ") else ""
    return run_case(
        warm, CASES[case], on_hosts=how == "on hosts", launcher=launcher, has_defaults=how == "with defaults"
    )


def marked(names: list[str]) -> list[object]:
    return [pytest.param(CASES[name], id=name, marks=pytest.mark.program(name)) for name in names]


@pytest.mark.parametrize("case", marked(FAULTS))
def test_what_is_wrong_is_named_with_its_ranks_and_its_line(case: Case, outcome: Outcome) -> None:
    start = planned(outcome.report) if outcome.report is not None else None
    score = score_fault(case, outcome.report, outcome.delay_s, start=start)
    assert score.is_right, (score, outcome.output)


@pytest.mark.program(ON_HOSTS)
def test_a_rank_that_is_alone_on_its_host_is_seen_from_outside(outcome: Outcome) -> None:
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    score = score_fault(CASES[ON_HOSTS.partition(" ")[0]], outcome.report, outcome.delay_s)
    assert score.is_right, (score, outcome.output)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.program(name)) for name in [*LAUNCHED, WITH_DEFAULTS]]
)
def test_it_is_named_however_ranks_are_started_and_whatever_the_trainer_has(name: str, outcome: Outcome) -> None:
    score = score_fault(CASES[name.partition(" ")[0]], outcome.report, outcome.delay_s)
    assert score.is_right, (score, outcome.output)


@pytest.mark.parametrize("case", marked(HEALTHY))
def test_nothing_is_said_of_what_only_takes_its_time(case: Case, outcome: Outcome) -> None:
    score = score_healthy(case, outcome.report, outcome.exit_codes, outcome.said, started=outcome.started)
    assert score.is_right, (score, outcome.output)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in recorded_cases()])
def test_a_recording_is_judged_as_it_is_known_to_be(case: Case) -> None:
    score = score_recording(case)
    assert score.is_right, score
