"""A strategy that is given the guard is the one that it was; what cannot be guarded is left alone, and that is said."""

import copy
import io
import pickle
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from guard_of import guard_of
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
    XLAStrategy,
)
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_ncclsafe import CollectiveTimer, LoaderTuner, SafeDDP, safe_callbacks
from lightning_ncclsafe.running import guarding
from lightning_ncclsafe.running.guarding import Unguarded, guard_trainer, guarded_class, say_of_fabric
from lightning_ncclsafe.running.variables import OPTIONS
from lightning_ncclsafe.strategies.guarded import GuardedStrategy, guards

DDP_NAMES = [
    name
    for name, entry in StrategyRegistry.items()
    if entry["strategy"] in (DDPStrategy, ModelParallelStrategy) and not name.endswith("_ncclsafe")
]
Said = Callable[[], list[str]]


class OwnDDP(DDPStrategy):
    """One of a user's own."""

    def __init__(self, answer: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.answer = answer

    def barrier(self, name: str | None = None) -> None:  # type: ignore[override]
        self.answer += 1


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "_printed", set())
    monkeypatch.setenv("NCCLSAFE", "1")
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What of ours was said since the last time."""
    return lambda: [
        line.removeprefix("[ncclsafe] ") for line in capsys.readouterr().err.splitlines() if "[ncclsafe]" in line
    ]


def trainer_with(strategy: str | Strategy = "ddp_fork", **kwargs: Any) -> L.Trainer:
    given = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False} | kwargs
    return L.Trainer(strategy=strategy, **given)


@pytest.mark.parametrize("name", DDP_NAMES)
def test_a_named_strategy_keeps_all_its_attributes(name: str, said: Said) -> None:
    strategy = (trainer := trainer_with(name)).strategy
    before, kind, launcher = dict(vars(strategy)), type(strategy), strategy.launcher
    guard_trainer(trainer)
    assert trainer.strategy is strategy and guards(strategy) and isinstance(strategy, kind)
    assert {key: vars(strategy)[key] for key in before} == before and strategy.launcher is launcher
    assert "launch" in vars(launcher)
    assert (type(strategy).__name__, type(strategy).__module__) == (kind.__name__, kind.__module__)
    assert repr(strategy).startswith(f"<{kind.__module__}.{kind.__qualname__} object")
    assert said() == []


def test_the_ddp_names_include_the_common_ones() -> None:
    assert {"ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_find_unused_parameters_true"} <= {*DDP_NAMES}


def test_several_devices_with_an_automatic_strategy_are_guarded() -> None:
    guard_trainer(trainer := trainer_with("auto"))
    assert guards(trainer.strategy) and isinstance(trainer.strategy, DDPStrategy)


def test_a_strategy_instance_keeps_all_its_arguments() -> None:
    def hook(state: object, bucket: Any) -> Any: ...

    environment = LightningEnvironment()
    strategy = DDPStrategy(
        None,
        [torch.device("cpu")] * 2,
        environment,
        ddp_comm_hook=hook,
        process_group_backend="gloo",
        timeout=timedelta(seconds=77),
        start_method="fork",
        find_unused_parameters=True,
        static_graph=True,
    )
    guard_trainer(trainer := trainer_with(strategy, accelerator="auto", devices="auto"))
    assert trainer.strategy is strategy and guards(strategy)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "static_graph": True}
    assert (strategy._ddp_comm_hook, strategy.cluster_environment) == (hook, environment)
    assert (strategy._process_group_backend, strategy._timeout) == ("gloo", timedelta(seconds=77))
    assert guard_of(strategy).limits.timeout_s == 77.0


@pytest.mark.parametrize(
    ("strategy", "communicates"),
    [(DDPStrategy(), False), (FSDPStrategy(), True), (ModelParallelStrategy(tensor_parallel_size=1), True)],
)
def test_model_sharding_strategies_are_recognised(strategy: Any, communicates: bool) -> None:
    """As with this package's own classes; there is no FSDP Trainer without a GPU."""
    guard_trainer(SimpleNamespace(strategy=strategy, callbacks=[]))
    assert guards(strategy) and strategy.forward_communicates is communicates


def test_a_user_strategy_class_keeps_its_behaviour() -> None:
    strategy = OwnDDP(41, start_method="fork")
    guard_trainer(trainer_with(strategy))
    assert guards(strategy) and isinstance(strategy, OwnDDP) and type(strategy).__name__ == "OwnDDP"
    strategy.barrier("anything")
    assert strategy.answer == 42


@pytest.mark.parametrize(("kind", "arguments"), [(DDPStrategy, ()), (OwnDDP, (41,))])
def test_spawned_ranks_and_copies_are_guarded(kind: type, arguments: tuple[int, ...]) -> None:
    strategy = kind(*arguments, start_method="spawn")
    guard_trainer(trainer_with(strategy))
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        file = io.BytesIO()
        pickle.dump(strategy, file, protocol)
        file.seek(0)
        for other in (pickle.load(file), copy.copy(strategy), copy.deepcopy(strategy)):
            assert type(other) is type(strategy) and other is not strategy
            assert guard_of(other).limits == guard_of(strategy).limits and other._start_method == "spawn"
            assert vars(other).keys() == vars(strategy).keys()


def test_a_safe_strategy_is_unchanged(said: Said) -> None:
    strategy = SafeDDP(suspect_after=33, start_method="fork")
    guard_trainer(trainer_with(strategy))
    assert type(strategy) is SafeDDP and guard_of(strategy).limits.suspect_after_s == 33.0
    assert said() == []


def test_arguments_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SUSPECT_AFTER": "5", "TIMEOUT": "50", "ON_TIMEOUT": "report", "REPORT_DIR": "here"}.items():
        monkeypatch.setenv(f"NCCLSAFE_{name}", value)
    strategy: Any = DDPStrategy(start_method="fork", timeout=timedelta(seconds=99))
    guard_trainer(trainer_with(strategy))
    limits, report_dir, _ = guard_of(strategy)
    assert (limits.suspect_after_s, limits.timeout_s, limits.on_timeout) == (5.0, 50.0, "report")
    assert report_dir == "here" and strategy._timeout == timedelta(seconds=50)


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, XLAStrategy, Strategy])
def test_other_strategies_are_not_guarded(kind: type) -> None:
    with pytest.raises(Unguarded, match=f"^{kind.__name__} is not supported, only DDPStrategy, FSDPStrategy and Model"):
        guarded_class(kind)


def test_one_device_needs_no_guard_and_a_message_is_printed_once(said: Said) -> None:
    for _ in range(2):
        guard_trainer(trainer := trainer_with("auto", devices=1))
        assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
    line = "this Trainer runs without the guard: it trains on one device, so no rank waits for another"
    assert said() == [line]


def test_a_user_launcher_is_not_guarded(said: Said) -> None:
    class Ours(_Launcher):
        is_interactive_compatible = True

        def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any: ...

        def kill(self, signum: Any) -> None: ...

    class Launched(DDPStrategy):
        def _configure_launcher(self) -> None:
            self._launcher = Ours()

    guard_trainer(trainer := trainer_with(Launched()))
    assert type(trainer.strategy) is Launched
    assert said() == ["this Trainer runs without the guard: the ranks of Launched are started by Ours"]


def test_invalid_limits_leave_the_strategy_unchanged(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setenv("NCCLSAFE_SUSPECT_AFTER", "60")
    strategy = (trainer := trainer_with(DDPStrategy(start_method="fork", timeout=timedelta(seconds=30)))).strategy
    before = dict(vars(strategy))
    guard_trainer(trainer)
    assert type(strategy) is DDPStrategy and vars(strategy) == before and "launch" not in vars(strategy.launcher)
    (line,) = said()
    assert "without the guard: suspect_after=60.0 is 60 s, but it must be less than timeout=" in line


def test_a_guard_failure_is_printed_and_training_continues(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(GuardedStrategy, "take_guard", fail)
    strategy = (trainer := trainer_with()).strategy
    guard_trainer(trainer)
    assert type(strategy) is DDPStrategy
    (line,) = said()
    assert line.startswith("the guard failed and is off; training continues: OSError('no')")


def test_a_wrong_variable_is_reported_once_by_one_rank(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setenv("NCCLSAFE", "banana\n")
    trainers = [trainer_with(), trainer_with()]
    for trainer in trainers:
        guard_trainer(trainer)
        assert type(trainer.strategy) is DDPStrategy
    (line,) = said()
    assert line.endswith("the guard: NCCLSAFE='banana\\n' in the environment is unknown; it must be 1 or 0.")
    monkeypatch.setattr(guarding, "_printed", set())
    monkeypatch.setattr(guarding.rank_zero_only, "rank", 1)
    guard_trainer(trainers[0])
    assert said() == []


def test_an_unguarded_fabric_is_reported_once(said: Said) -> None:
    say_of_fabric()
    say_of_fabric()
    assert said() == ["Fabric runs without the guard, which supports Trainers only"]


def added(trainer: L.Trainer) -> list[str]:
    before = [*trainer.callbacks]
    guard_trainer(trainer)
    assert trainer.callbacks[len(trainer.callbacks) - len(before) :] == before
    return [type(each).__name__ for each in trainer.callbacks[: len(trainer.callbacks) - len(before)]]


def test_callbacks_are_added_before_user_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert added(trainer_with()) == []
    monkeypatch.setenv("NCCLSAFE_CALLBACKS", "recommended")
    assert added(trainer_with()) == [type(each).__name__ for each in safe_callbacks()]
    assert added(trainer_with(SafeDDP(), callbacks=[EarlyStopping("loss")])) == [
        type(each).__name__ for each in safe_callbacks()
    ]


def test_the_users_callback_list_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLSAFE_CALLBACKS", "LoaderTuner")
    theirs: list[Any] = [EarlyStopping("loss")]
    trainer = trainer_with(callbacks=theirs)
    after_lightning = [*theirs]
    assert added(trainer) == ["LoaderTuner"] and theirs == after_lightning


def test_callbacks_the_program_already_has_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnTuner(LoaderTuner):
        pass

    monkeypatch.setenv("NCCLSAFE_CALLBACKS", "CollectiveTimer,LoaderTuner,LoggerOffload")
    assert added(trainer_with(callbacks=[CollectiveTimer(), OwnTuner()])) == ["LoggerOffload"]


def test_callbacks_get_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[{"class_path": "CollectiveTimer", "init_args": {"trace": false, "every_n_steps": 7}}, "recommended",'
    path = "lightning.pytorch.callbacks.EarlyStopping"
    monkeypatch.setenv("NCCLSAFE_CALLBACKS", f'{text} {{"class_path": "{path}", "init_args": {{"monitor": "loss"}}}}]')
    trainer = trainer_with()
    assert added(trainer) == [*(type(each).__name__ for each in safe_callbacks()), "EarlyStopping"]
    settings = next(each for each in trainer.callbacks if isinstance(each, CollectiveTimer)).settings
    assert (settings.trace, settings.every_n_steps) == (False, 7)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[{"class_path": "LoaderTuner", "init_args": {"aply": false}}]', "unexpected keyword argument 'aply'"),
        ("pathlib.Path", "'pathlib.Path' is not a Callback of lightning.pytorch"),
        ("lightning.pytorch.callbacks.EarlyStoping", "is not a Callback of lightning.pytorch"),
        ("not_there.Callback", "No module named 'not_there'"),
    ],
)
def test_an_invalid_callback_does_not_prevent_the_guard(
    text: str, why: str, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setenv("NCCLSAFE_CALLBACKS", text)
    trainer = trainer_with()
    assert added(trainer) == [] and guards(trainer.strategy)
    (line,) = said()
    assert line.startswith("no callback was added to the Trainer: ") and why in line


def test_one_device_gets_no_callbacks_that_need_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLSAFE_CALLBACKS", "recommended")
    assert added(trainer_with("auto", devices=1)) == []
