"""A Trainer of another process, read while it trains."""

from pathlib import Path
from textwrap import dedent

from polling import until
from warm import Warm, environment

from lightning_ncclsafe.facts import LoopEnd, Phase, Progress
from lightning_ncclsafe.inspecting.looks import StackReader
from lightning_ncclsafe.inspecting.objects import Interpreter
from lightning_ncclsafe.inspecting.rank_objects import counters_of

PROGRAM = """
    import sys, time

    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            if sys.argv[2] == "train" and (self.current_epoch, batch_idx) == (1, 2):
                self.trainer.should_stop = sys.argv[3] == "stop"
                self.wait()
            return self.layer(batch.float().unsqueeze(1)).sum()

        def validation_step(self, batch, batch_idx):
            if sys.argv[2] == "validate" and (self.current_epoch, batch_idx) == (1, 1):
                self.wait()

        def train_dataloader(self):
            if sys.argv[2] == "load" and self.trainer.current_epoch == 1:
                self.wait()
            return DataLoader(range(6))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def wait(self):
            open(sys.argv[1], "w").close()
            time.sleep(100)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, limit_train_batches=4, num_sanity_val_steps=0,
        enable_checkpointing=False, reload_dataloaders_every_n_epochs=1, **quiet,
    )
    trainer.fit(Net(), val_dataloaders=DataLoader(range(2)))
"""


def read(
    warm: Warm, tmp_path: Path, *arguments: str
) -> tuple[Progress, Progress, LoopEnd, dict[str, str], tuple[int | None, ...]]:
    program, begun = tmp_path / "train.py", tmp_path / "begun"
    program.write_text(dedent(PROGRAM))
    with (tmp_path / "output").open("wb") as output:
        one = warm.start(
            [str(program), str(begun), *arguments], output=output.fileno(), cwd=tmp_path, env=environment()
        )
        try:
            until(begun.exists)
            threads, _ = StackReader().read(one.pid)
            stack = next(thread.frames for thread in threads if thread.is_main)
            with Interpreter(one.pid) as interpreter:
                found = counters_of(interpreter, stack)
                assert counters_of(interpreter, stack[-2:]) is None
        finally:
            one.end_session()
            one.wait(10)
    assert found is not None
    facts = found.trainer
    at = tuple(found.within(Progress(phase=phase)) for phase in (Phase.TRAIN, Phase.VALIDATE))
    return *at, facts.end, facts.settings, (facts.batches_before, facts.batches_begun, facts.batches, facts.validated)


def test_training_counters_are_read(warm: Warm, tmp_path: Path) -> None:
    trains, _, end, settings, counts = read(warm, tmp_path, "train", "go-on")
    assert (trains.epoch, trains.batch_idx, trains.is_last_batch, trains.global_step) == (1, 2, False, 6)
    assert (end, counts) == (LoopEnd.UNKNOWN, (4, 3, 4, 2))
    assert settings["max_epochs"] == "3" and settings["limit_train_batches"] == "4" and settings["max_steps"] == "-1"


def test_should_stop_is_read(warm: Warm, tmp_path: Path) -> None:
    assert read(warm, tmp_path, "train", "stop")[2] is LoopEnd.SHOULD_STOP


def test_validation_counters_are_read(warm: Warm, tmp_path: Path) -> None:
    trains, validates, end, _, counts = read(warm, tmp_path, "validate", "")
    assert (validates.epoch, validates.batch_idx, validates.is_last_batch) == (1, 1, True)
    assert (trains.batch_idx, end, counts) == (3, LoopEnd.DATA, (4, 4, 4, 1))


def test_an_epoch_without_a_loader_has_no_batch_yet(warm: Warm, tmp_path: Path) -> None:
    trains, _, _, _, counts = read(warm, tmp_path, "load", "")
    assert (trains.epoch, trains.batch_idx, trains.is_last_batch, counts[:2]) == (1, -1, False, (4, 0))
