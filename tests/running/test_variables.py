"""What the environment says of the guard: read whole, or refused with one line that names the variable."""

from typing import Any

import pytest
from lightning.pytorch import Callback

import lightning_ncclsafe
from lightning_ncclsafe import PhaseTimeouts
from lightning_ncclsafe.running.variables import CALLBACKS, OPTIONS, WantedCallback, wanted
from lightning_ncclsafe.strategies.guarded import GuardedStrategy

ON = {"NCCLSAFE": "1"}


def callback(name: str, **arguments: Any) -> WantedCallback:
    return WantedCallback(name=name, arguments=arguments)


def test_one_variable_is_enough() -> None:
    assert (wanted(ON).callbacks, wanted(ON).guard) == ((), {})
    assert wanted({**ON, "NCCLSAFE_TIMEOUT": "", "NCCLSAFE_CALLBACKS": ""}) == wanted(ON)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("suspect_after", "12.5", 12.5),
        ("timeout", "600", 600.0),
        ("on_timeout", "report", "report"),
        ("report_dir", "a b/c", "a b/c"),
        ("phase_timeouts", "init=600, train=1e2", PhaseTimeouts(init=600.0, train=100.0)),
    ],
)
def test_strategy_arguments_are_read(name: str, text: str, value: object) -> None:
    assert wanted({**ON, f"NCCLSAFE_{name.upper()}": text}).guard == {name: value}


def test_every_guard_argument_has_a_variable() -> None:
    takes = set(GuardedStrategy.take_guard.__annotations__) - {"return", "sigterm_broadcast"}
    assert {option.name for option in OPTIONS} == takes | {"timeout", "callbacks"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("recommended", (callback("recommended"),)),
        ("LoaderTuner, my.own_module.Timer", (callback("LoaderTuner"), callback("my.own_module.Timer"))),
        (' ["LoaderTuner"]', (callback("LoaderTuner"),)),
        (
            '["recommended", {"class_path": "CollectiveTimer", "init_args": {"trace": false}}]',
            (callback("recommended"), callback("CollectiveTimer", trace=False)),
        ),
    ],
)
def test_callbacks_are_read(text: str, found: tuple[WantedCallback, ...]) -> None:
    assert wanted({**ON, "NCCLSAFE_CALLBACKS": text}).callbacks == found


def test_all_public_callbacks_have_names() -> None:
    public = {name: getattr(lightning_ncclsafe, name) for name in lightning_ncclsafe.__all__}
    assert {*CALLBACKS} == {name for name, it in public.items() if isinstance(it, type) and issubclass(it, Callback)}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("", "banana", "it must be 1 or 0."),
        ("", "1 ", "it must be 1 or 0."),
        ("_SUSPECT_AFTER", "soon", "it must be a number of seconds, more than 0 and at most 1e9."),
        ("_SUSPECT_AFTER", "nan", "it must be a number of seconds, more than 0"),
        ("_TIMEOUT", "-1", "it must be a number of seconds, more than 0"),
        ("_TIMEOUT", "1e999", "it must be a number of seconds, more than 0"),
        ("_ON_TIMEOUT", "kill", "it must be abort or report."),
        ("_PHASE_TIMEOUTS", "trian=5", "phases are init, sanity_check,"),
        ("_PHASE_TIMEOUTS", "train=5,train=6", "phases are init, sanity_check,"),
        ("_PHASE_TIMEOUTS", "train", "it must be a number of seconds, more than 0"),
        ("_CALLBACKS", "Tuner", "'Tuner' is not a callback; it must be recommended, one of HostPreflight,"),
        ("_CALLBACKS", "LoaderTuner,", "'' is not a callback"),
        ("_CALLBACKS", "os.system('true')", "is not a callback"),
        ("_CALLBACKS", "[1]", "'1' is not a callback"),
        ("_CALLBACKS", '[{"class_path": "recommended", "init_args": {"trace": 1}}]', "is not a callback"),
        ("_CALLBACKS", '[{"class_path": "LoaderTuner", "args": {}}]', "is not a callback"),
        ("_CALLBACKS", "[" * 100_000, "it starts like a JSON list, but is not valid JSON"),
    ],
)
def test_a_wrong_value_is_reported_with_the_allowed_ones(name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        wanted({**ON, f"NCCLSAFE{name}": text})
    words = str(raised.value)
    assert words.startswith(f"NCCLSAFE{name}=") and said in words and len(words) < 600


@pytest.mark.parametrize("text", ["\x1b[31m\n\rred", "\u202e" * 9, "x" * 1_000_000, "\udcff"])
def test_the_error_for_any_value_is_one_printable_line(text: str) -> None:
    for name in ("NCCLSAFE", "NCCLSAFE_TIMEOUT", "NCCLSAFE_CALLBACKS", "NCCLSAFE_PHASE_TIMEOUTS"):
        with pytest.raises(ValueError) as raised:
            wanted({**ON, name: text})
        assert str(raised.value).isprintable() and len(str(raised.value)) < 600


def test_contradictory_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"suspect_after=60\.0 is 60 s, but it must be less than timeout=30\.0"):
        wanted({**ON, "NCCLSAFE_SUSPECT_AFTER": "60", "NCCLSAFE_TIMEOUT": "30"})
