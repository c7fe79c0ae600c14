"""The callbacks themselves: what they take, and what they need."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_ncclsafe import DatasetAgreement, SafeDDP
from lightning_ncclsafe.settings import AgreementSettings


def test_the_defaults_are_those_of_a_strategy_without_the_callback() -> None:
    assert DatasetAgreement().settings == AgreementSettings()
    assert AgreementSettings() == AgreementSettings(on_mismatch="raise", content="sample", on_uneven="raise")


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        ("on_mismatch", "'raise' or 'warn'"),
        ("content", "'sample', 'full' or 'off'"),
        ("on_uneven", "'raise', 'stop_together' or 'repeat'"),
    ],
)
@pytest.mark.parametrize("value", ["RAISE", None, True])
def test_an_unknown_word_is_refused_with_what_is_allowed(argument: str, allowed: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value!r} is unknown; it must be {allowed}"):
        DatasetAgreement(**{argument: value})


def test_a_strategy_that_compares_nothing_is_refused(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(strategy=DDPStrategy())
    with pytest.raises(TypeError, match="a Trainer with DDPStrategy, which compares nothing"):
        DatasetAgreement().setup(trainer, LightningModule(), "fit")


def test_a_strategy_of_ours_is_taken() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy=SafeDDP(), logger=False)
    DatasetAgreement(on_uneven="repeat").setup(trainer, LightningModule(), "fit")
