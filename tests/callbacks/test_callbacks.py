"""The callbacks themselves: what they take, and what they need."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_ncclsafe import (
    CollectiveTimer,
    DatasetAgreement,
    HostPreflight,
    JustInTimeCheckpoint,
    LoaderTuner,
    SafeDDP,
    safe_callbacks,
)
from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.settings import AgreementSettings


def test_defaults_match_a_strategy_without_the_callback() -> None:
    assert DatasetAgreement().settings == AgreementSettings()
    assert AgreementSettings() == AgreementSettings(on_mismatch="raise", content="sample", on_uneven="raise")


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        ("on_mismatch", "'raise', 'raise_on_hang' or 'warn'"),
        ("content", "'sample', 'full' or 'off'"),
        ("on_uneven", "'raise', 'stop_together' or 'repeat'"),
    ],
)
@pytest.mark.parametrize("value", ["RAISE", None, True])
def test_an_unknown_option_is_refused_with_the_allowed_ones(argument: str, allowed: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value!r} is unknown; it must be {allowed}"):
        DatasetAgreement(**{argument: value})


def test_a_stock_strategy_is_refused(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(strategy=DDPStrategy())
    with pytest.raises(TypeError, match=r"DatasetAgreement needs a strategy .*, but this Trainer has DDPStrategy"):
        DatasetAgreement().setup(trainer, LightningModule(), "fit")


@pytest.mark.parametrize("kind", [CollectiveTimer, DatasetAgreement, HostPreflight, JustInTimeCheckpoint, LoaderTuner])
def test_a_second_callback_of_the_same_class_is_refused(kind: type[Callback]) -> None:
    derived = type("Derived", (kind,), {})

    def setup(*callbacks: Callback) -> None:
        strategy = SafeDDP()
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, callbacks=[*callbacks])
        callbacks[0].setup(trainer, LightningModule(), "fit")

    for second in (kind(), derived()):
        with pytest.raises(ValueError, match=f"^This Trainer has two {kind.__name__} callbacks; pass only one.$"):
            setup(kind(), second)
    with pytest.raises(ValueError, match=f"has two {kind.__name__}"):
        setup(derived(), kind())
    with pytest.raises(ValueError, match=f"has 3 {kind.__name__}"):
        setup(kind(), kind(), kind())
    setup(*safe_callbacks(kind()))


def test_a_safe_strategy_is_accepted() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy=SafeDDP(), logger=False)
    DatasetAgreement(on_uneven="repeat").setup(trainer, LightningModule(), "fit")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dirpath": "s3://bucket/checkpoints"}, "dirpath='s3://bucket/checkpoints' is remote"),
        ({"keep": 0}, "keep=0 must be a whole number of at least 1"),
        ({"keep": True}, "keep=True must be a whole number"),
        ({"grace": 0}, "grace=0 must be longer than 0 s"),
    ],
)
def test_invalid_just_in_time_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        JustInTimeCheckpoint(**settings)


def test_a_resumed_run_keeps_its_name() -> None:
    first, second = JustInTimeCheckpoint(), JustInTimeCheckpoint()
    assert first.settings.run != second.settings.run
    second.on_load_checkpoint(Trainer(logger=False), LightningModule(), {KEY: {"run": first.settings.run}})
    assert first.settings.run == second.settings.run
    second.on_load_checkpoint(Trainer(logger=False), LightningModule(), {"epoch": 1})
    assert first.settings.run == second.settings.run, "a checkpoint of another callback"


def batch_hooks(callback: Callback) -> set[str]:
    """Those that Lightning calls for each batch: the others it passes over."""
    words = ("_batch_", "_zero_grad", "_backward", "_optimizer_step")
    named = {name for name in dir(Callback) if name.startswith("on_") and any(word in name for word in words)}
    return {name for name in named if callable(getattr(callback, name))}


def test_callbacks_define_only_the_batch_hooks_they_need() -> None:
    assert len(batch_hooks(Callback())) == 12
    found = {type(one).__name__: batch_hooks(one) for one in [*safe_callbacks(), JustInTimeCheckpoint()]}
    assert found == {
        "HostPreflight": set(),
        "DatasetAgreement": set(),
        "LoaderTuner": set(),
        "LoggerOffload": {"on_train_batch_start"},
        "CollectiveTimer": {"on_train_batch_end"},
        "JustInTimeCheckpoint": set(),
    }


class Counting(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


def test_a_subclass_keeps_its_own_batch_hooks() -> None:
    class Derived(LoaderTuner):
        begun = 0

        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            self.begun += 1

    class Both(DatasetAgreement, Counting):
        def __init__(self) -> None:
            DatasetAgreement.__init__(self)
            self.batches = 0

    derived, both = Derived(), Both()
    derived.on_train_batch_start(None, None, None, 0)
    both.on_train_batch_end(None, None, None, None, 0)
    assert (derived.begun, both.batches) == (1, 1)
    assert (batch_hooks(derived), batch_hooks(both)) == ({"on_train_batch_start"}, {"on_train_batch_end"})
