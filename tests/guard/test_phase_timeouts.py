"""Hard limits by phase: what a user may set, and which one a waiting rank has."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import jsonargparse
import pytest
from guard_of import guard_of
from lightning.pytorch.strategies import DDPStrategy

from lightning_ncclsafe import PhaseTimeouts, SafeDDP
from lightning_ncclsafe._torch import build
from lightning_ncclsafe.facts import Collective, Phase
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard.thresholds import Thresholds, limits_words
from lightning_ncclsafe.rules.kit.activity import Activity
from lightning_ncclsafe.rules.kit.landmarks import Kind
from lightning_ncclsafe.settings import BACKSTOP_S, Limits, check_limits
from lightning_ncclsafe.strategies import guarded

EXAMPLE = PhaseTimeouts(init=300, train=100, checkpoint=timedelta(minutes=20))
TRAIN = PhaseKind(phase=Phase.TRAIN, per_batch=True)
FIRST = PhaseKind(phase=Phase.TRAIN, first=True, per_batch=True)
CHECKPOINT = PhaseKind(phase=Phase.CHECKPOINT)


def limits(timeout_s: float = 1800, suspect_after: float | None = None, **phases: Any) -> Limits:
    return check_limits(suspect_after, timeout_s, "abort", PhaseTimeouts(**phases).as_seconds())


def thresholds_in(phase_kind: PhaseKind, given: Limits) -> Thresholds:
    patience = Thresholds(given)
    patience.observe(0.0, phase_kind, -1)
    return patience


def waiting(timeout_s: float = 0.0) -> Activity:
    collective = Collective(group="0", seq=3, op="all_reduce", timeout_ms=round(timeout_s * 1000))
    return Activity(kind=Kind.COLLECTIVE, collective=collective)


def test_durations_and_seconds_mean_the_same_and_none_is_not_set() -> None:
    assert EXAMPLE.as_seconds() == {"init": 300.0, "train": 100.0, "checkpoint": 1200.0}
    assert PhaseTimeouts().as_seconds() == {}


def test_every_argument_is_a_phase_with_a_limit_of_its_own() -> None:
    names = ("init", "sanity_check", "first_batch", "train", "validate", "test", "predict", "checkpoint")
    given = {name: 10.0 + number for number, name in enumerate(names)}
    moments = [PhaseKind(phase=Phase(name)) for name in names if name != "first_batch"]
    found = {
        phase_kind.limit_name: thresholds_in(phase_kind, limits(**given)).limit_s for phase_kind in [FIRST, *moments]
    }
    assert found == given


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "train=0 must be longer than 0 s and at most 1e+09 s"),
        (timedelta(seconds=-1), "train=datetime.timedelta(days=-1, seconds=86399) must be longer than 0 s"),
        (math.nan, "train=nan must be longer than 0 s"),
        (math.inf, "train=inf must be longer than 0 s and at most 1e+09 s"),
        ("100", "train='100' is a str; it must be a timedelta or a number of seconds"),
        (True, "train=True is a bool"),
    ],
)
def test_a_wrong_value_names_its_argument(value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        PhaseTimeouts(init=3, train=value)
    assert str(caught.value).startswith(said)


def test_it_is_frozen_keyword_only_and_can_be_copied_and_sent() -> None:
    with pytest.raises(FrozenInstanceError):
        EXAMPLE.train = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        PhaseTimeouts(300)  # type: ignore[misc]
    strategy = SafeDDP(phase_timeouts=EXAMPLE)
    assert guard_of(strategy).limits.phases_s == EXAMPLE.as_seconds()
    for twin in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert guard_of(twin).limits == guard_of(strategy).limits


@pytest.mark.parametrize("with_class_path", [True, False])
def test_it_is_made_from_a_configuration_and_written_again(with_class_path: bool) -> None:
    given: dict[str, Any] = {"init": 300, "train": 100.0, "checkpoint": "0:20:00"}
    if with_class_path:
        given = {"class_path": "lightning_ncclsafe.PhaseTimeouts", "init_args": given}
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(DDPStrategy, "strategy")
    strategy = {"class_path": "lightning_ncclsafe.SafeDDP", "init_args": {"phase_timeouts": given}}
    text = parser.dump(parser.parse_object({"strategy": strategy}))
    assert guard_of(parser.instantiate(parser.parse_string(text)).strategy).limits.phases_s == EXAMPLE.as_seconds()


def test_a_rank_is_out_at_the_limit_of_the_phase_it_waits_in() -> None:
    given = limits(1800, train=100, checkpoint=1200, first_batch=600)
    for phase_kind, limit_s in ((TRAIN, 100), (CHECKPOINT, 1200), (FIRST, 600), (PhaseKind(phase=Phase.INIT), 1800)):
        patience = thresholds_in(phase_kind, given)
        assert not patience.is_past_limit(limit_s - 0.1, waiting())
        assert patience.is_past_limit(limit_s, waiting())


def test_a_group_with_a_longer_timeout_of_its_own_keeps_it() -> None:
    patience = thresholds_in(TRAIN, limits(1800, train=100))
    assert not patience.is_past_limit(3599, waiting(3600))
    assert patience.is_past_limit(3600, waiting(3600))


@pytest.mark.parametrize("not_own_s", [1800, 600, 1200 + BACKSTOP_S, 1800 + BACKSTOP_S])
def test_a_timeout_that_nobody_chose_or_that_we_have_set_is_not_a_groups_own(not_own_s: float) -> None:
    patience = thresholds_in(TRAIN, limits(1800, train=100, checkpoint=1200))
    assert patience.is_past_limit(100, waiting(not_own_s))


def test_without_limits_of_phases_half_an_hour_is_as_much_a_groups_own_as_any() -> None:
    assert not thresholds_in(TRAIN, limits(100)).is_past_limit(1799, waiting(1800))


@pytest.mark.parametrize("suspect_after", [None, 60.0])
def test_a_rank_is_always_looked_at_before_its_phase_is_out(suspect_after: float | None) -> None:
    given = limits(1800, suspect_after, train=8)
    patience = thresholds_in(TRAIN, given)
    assert patience.suspect_after_s(joined=True) == 4
    assert not patience.is_time_to_look(3.9, joined=True)
    assert patience.is_time_to_look(4.0, joined=True)
    assert thresholds_in(CHECKPOINT, given).suspect_after_s(joined=True) == (suspect_after or 20)


def test_the_first_line_names_the_limits() -> None:
    assert limits_words(limits(1800, None, init=300, train=100)) == (
        "reports a wait that is unusually long for its phase (10 s or more), "
        "aborts after 1800 s (init 300 s, train 100 s)"
    )
    assert limits_words(limits(12)) == (
        "reports a wait that is unusually long for its phase (6 s or more), aborts after 12 s"
    )
    assert limits_words(limits(1800, 30)) == "reports a wait of 30 s, aborts after 1800 s"


@pytest.mark.parametrize(("changes", "limit_s"), [(True, 300), (False, 1800)])
def test_the_process_group_is_created_with_the_limit_of_init_where_that_can_be_changed(
    changes: bool, limit_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "GLOO_TIMEOUT_CHANGES", changes)
    seen: list[timedelta | None] = []
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda strategy: seen.append(strategy._timeout))
    strategy = SafeDDP(phase_timeouts=EXAMPLE)
    own = strategy._timeout
    monkeypatch.setattr(guarded, "GuardedCall", MagicMock())
    with strategy.watch(MagicMock()):
        strategy.setup_environment()
    assert seen == [timedelta(seconds=limit_s + BACKSTOP_S)]
    assert strategy._timeout == own
