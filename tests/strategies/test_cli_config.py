"""The config files of examples/config, as LightningCLI reads them: whole, written again, overridden, and mistaken."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonargparse
import pytest
import yaml
from guard_of import guard_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from warm import Warm

from lightning_ncclsafe import SafeDDP, SafeFSDP, SafeModelParallel, safe_callbacks

FOLDER = Path(__file__).parents[2] / "examples" / "config"
CONFIGS = {"ddp": SafeDDP, "fsdp": SafeFSDP, "model_parallel": SafeModelParallel}
PHASES_S = {"init": 300.0, "first_batch": 600.0, "train": 100.0, "checkpoint": 1200.0}
CPU = ("--trainer.accelerator=cpu", "--trainer.devices=1")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The example's main.py."""
    spec = spec_from_file_location("examples_config_main", FOLDER / "main.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Lightning warns of arguments that are there as well.
    monkeypatch.setattr(sys, "argv", ["main.py"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # Lightning sets them; that is to be undone.
        monkeypatch.setenv(name, "0")


def strategy_of(program: ModuleType, *arguments: str) -> Any:
    """What the example makes of its file for DDP and of arguments."""
    return program.main(["--config", str(FOLDER / "ddp.yaml"), *CPU, *arguments], run=False).trainer.strategy


def printed(program: ModuleType, capsys: pytest.CaptureFixture[str], config: Path) -> str:
    """What ``--print_config`` prints."""
    with pytest.raises(SystemExit) as ended:
        program.main(["--config", str(config), "--print_config"], run=False)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIGS)
def test_a_printed_config_is_read_as_the_same(
    name: str, program: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    once = printed(program, capsys, FOLDER / f"{name}.yaml")
    (tmp_path / "printed.yaml").write_text(once)
    assert printed(program, capsys, tmp_path / "printed.yaml") == once
    strategy = yaml.safe_load(once)["trainer"]["strategy"]
    assert strategy["class_path"] == f"lightning_ncclsafe.{CONFIGS[name].__name__}"
    # Seconds stay numbers, durations are as they were.
    assert strategy["init_args"]["phase_timeouts"]["train"] == 100.0
    assert "checkpoint: 0:20:00\n" in once


@pytest.mark.parametrize("name", CONFIGS)
def test_the_strategy_is_what_its_file_says(name: str) -> None:
    """Of FSDP, which has no Trainer without a GPU, too."""
    given = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["trainer"]["strategy"]
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    strategy = parser.instantiate(parser.parse_object({"strategy": given})).strategy
    assert type(strategy) is CONFIGS[name]
    assert (limits := guard_of(strategy).limits).phases_s == PHASES_S
    assert limits.timeout_s == 1800.0


@pytest.mark.parametrize("name", ["ddp", "model_parallel"])
def test_everything_is_made_from_the_file(name: str, program: ModuleType) -> None:
    trainer = program.main(["--config", str(FOLDER / f"{name}.yaml"), *CPU], run=False).trainer
    assert type(trainer.strategy) is CONFIGS[name]
    own = [type(callback) for callback in trainer.callbacks]
    assert [*map(type, safe_callbacks()), ModelCheckpoint] == [
        kind for kind in own if kind.__module__.startswith("lightning_ncclsafe.") or kind is ModelCheckpoint
    ]
    assert [type(logger) for logger in trainer.loggers] == [TensorBoardLogger, CSVLogger]


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("phase_timeouts.init=60", {"init": 60.0}),
        ("init_args.phase_timeouts.init_args.init=60.5", {"init": 60.5}),
        ("phase_timeouts.train=0:01:30", {"train": 90.0}),
        ("phase_timeouts.test=7", {"test": 7.0}),
    ],
)
def test_one_field_is_overridden(argument: str, changed: dict[str, float], program: ModuleType) -> None:
    limits = guard_of(strategy_of(program, f"--trainer.strategy.{argument}")).limits
    assert limits.phases_s == PHASES_S | changed
    assert limits.timeout_s == 1800.0


@pytest.mark.parametrize(("value", "seconds"), [("20", 20.0), ("2.5", 2.5), ("0:00:45", 45.0)])
def test_seconds_and_durations_are_given_alike(value: str, seconds: float, program: ModuleType) -> None:
    strategy = strategy_of(program, f"--trainer.strategy.suspect_after={value}")
    assert guard_of(strategy).limits.suspect_after_s == seconds


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("on_timeout=kill", ('"on_timeout"', "'abort', 'report'", "kill")),
        ("phase_timeouts.trian=5", ("'trian' is not accepted",)),
        ("suspect_afterwards=5", ("'suspect_afterwards' is not accepted",)),
        ("phase_timeouts.train=soon", ('"phase_timeouts"', '"train"', '"h:m:s"', "soon")),
        ("timeout=600", ('"timeout"', '"h:m:s"', "600")),
    ],
)
def test_a_mistake_is_named_by_the_parser(
    argument: str, said: tuple[str, ...], program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        strategy_of(program, f"--trainer.strategy.{argument}")
    assert ended.value.code == 2
    error = capsys.readouterr().err.partition("error: ")[2]
    assert all(words in error for words in ('"trainer.strategy"', *said)), error


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("strategy.phase_timeouts.train=-5", r"train=-5\.0 must be longer than 0 s"),
        ("strategy.suspect_after=-5", r"suspect_after=-5\.0 must be longer than 0 s"),
        ("strategy.timeout=-1 day, 0:00:00", r"timeout=datetime\.timedelta\(days=-1\) must be longer than 0 s"),
        ("callbacks+={class_path: lightning_ncclsafe.LoggerOffload, init_args: {block_timeout: 0}}", "block_timeout=0"),
    ],
)
def test_a_value_out_of_range_is_named(argument: str, said: str, program: ModuleType) -> None:
    with pytest.raises(ValueError, match=said):
        strategy_of(program, f"--trainer.{argument}")


def test_a_training_from_a_file(warm: Warm, tmp_path: Path) -> None:
    # Forked ranks need not import torch again, which is most of the time.
    arguments = ("--trainer.max_steps=3", "--trainer.accelerator=cpu", "--trainer.strategy.start_method=fork")
    command = [str(FOLDER / "main.py"), "fit", "--config", str(FOLDER / "ddp.yaml"), *arguments]
    (code,), said = warm.run(command, tmp_path, timeout_s=50)
    assert code == 0, said
    assert "[ncclsafe] watching 2 ranks" in said
    assert "(init 300 s, first_batch 600 s, train 100 s, checkpoint 1200 s)" in said
    assert "Logger wrote" not in said, "of what went well nothing is said"
