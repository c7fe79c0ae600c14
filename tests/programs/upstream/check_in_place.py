"""That our classes are in the place of Lightning's, in all processes: `make upstream` asks that first."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from compare import OURS  # noqa: E402
from outcomes import outcomes  # noqa: E402

# The classes that Lightning's tests import, in this process and in one that Lightning spawns; and what ends a process.
PROGRAM = """
    import os
    from unittest.mock import Mock

    import pytest
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.strategies.fsdp import FSDPStrategy

    class Mine(DDPStrategy):
        def barrier(self, *args, **kwargs):
            assert DDPStrategy.__name__ == {name!r}
            super().barrier(*args, **kwargs)

    @pytest.mark.parametrize("strategy", [DDPStrategy])
    def test_names(strategy):
        assert StrategyRegistry["ddp_spawn"]["strategy"].__name__ == strategy.__name__ == {name!r}
        assert FSDPStrategy.__name__ == {name!r}.replace("DDP", "FSDP")

    def test_that_ends_its_process():
        os._exit(3)

    @pytest.mark.flaky(reruns=3)
    def test_that_fails():
        assert 1 == 2

    def test_spawned(tmp_path):
        strategy = Mine(start_method="spawn")
        trainer = Trainer(
            default_root_dir=tmp_path, accelerator="cpu", devices=2, strategy=strategy, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(BoringModel())

    def test_logged(tmp_path):
        trainer = Trainer(
            default_root_dir=tmp_path, accelerator="cpu", max_steps=1, logger=CSVLogger(tmp_path), limit_val_batches=0,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(BoringModel())
        assert trainer.callbacks == []
"""


@pytest.mark.timeout(180)
def test_ours_are_in_place_in_all_processes_and_a_test_that_ends_its_process_is_passed_over(tmp_path: Path) -> None:
    file, notes = tmp_path / "test_program.py", tmp_path / "notes.jsonl"
    file.write_text(dedent(PROGRAM.format(name="SafeDDP")))
    command = [sys.executable, str(FOLDER / "in_place.py"), OURS, str(notes), "-p", "no:cacheprovider", str(file)]
    codes = [
        subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120).returncode
        for _ in range(2)
    ]
    found = {test.partition("::")[2]: outcome for test, outcome in outcomes(notes).items()}
    assert {test: (outcome.kind, outcome.used_ours) for test, outcome in found.items()} == {
        "test_names[DDPStrategy]": ("passed", False),
        "test_that_ends_its_process": ("ended", False),
        "test_that_fails": ("failed", False),
        "test_spawned": ("passed", True),
        "test_logged": ("passed", True),
    }
    assert codes == [3, 1]
    assert "assert 1 == 2" in found["test_that_fails"].why
    assert json.loads(notes.read_text().splitlines()[-1]) == {"id": ""}
