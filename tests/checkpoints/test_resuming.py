"""Which checkpoint a start goes on from where others have been there: one line each, and what is good is not lost."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_ncclsafe.checkpoints.folder import KEY
from lightning_ncclsafe.checkpoints.resuming import Resuming
from lightning_ncclsafe.exchange import MemoryExchange
from lightning_ncclsafe.settings import CheckpointSettings


class Connector:
    """Lightning's, as far as it loads a checkpoint: what it was asked for is kept."""

    _hpc_resume_path = None

    def __init__(self) -> None:
        self.path: str | None = None
        self._loaded_checkpoint: dict[str, Any] = {}

    def resume_start(self, path: str | None = None) -> None:
        self.path = path
        self._loaded_checkpoint = torch.load(path, weights_only=True) if path else {}


def save(folder: Path, step: int, *, job: str | None = "job mine", model: str = "weight", ranks: int = 1) -> str:
    """One of ours; without a job, one of a ModelCheckpoint."""
    folder.mkdir(exist_ok=True)
    ours = {KEY: {"run": "r", "job": job, "world_size": ranks, "positions": {}}} if job is not None else {}
    name = f"just-in-time-epoch=0-step={step}.ckpt" if job is not None else f"epoch=0-step={step}.ckpt"
    state = {model: torch.ones(1, 1), "bias": torch.ones(1)}
    content = {"state_dict": state, "lr_schedulers": [], "global_step": step, **ours}
    torch.save(content, folder / name)
    os.utime(folder / name, (1e9 + step, 1e9 + step))
    return str(folder / name)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,)))


class Trained:
    """As much of a ``Trainer`` as a start asks before it goes on."""

    def __init__(self, steps: int = 0) -> None:
        self.global_step = steps
        self.state = SimpleNamespace(fn="fit")
        self.checkpoint_callbacks: list[Any] = []
        self.lightning_module = Model()
        self.strategy = SimpleNamespace(restore_checkpoint_after_setup=False)
        epoch_loop = SimpleNamespace(on_run_start=lambda *_: None, reset=lambda: None)
        self.fit_loop = SimpleNamespace(epoch_loop=epoch_loop, _load_combined_loader_states=lambda: None)
        self._checkpoint_connector = Connector()


def gone_on_from(folder: Path, monkeypatch: pytest.MonkeyPatch, job: str = "mine", steps: int = 0) -> str | None:
    """The checkpoint that a training of one rank goes on from."""
    monkeypatch.setenv("NCCLSAFE_JOB", job)
    trainer, settings = Trained(steps), CheckpointSettings(dirpath=folder, resume=True)
    resuming = Resuming(trainer, settings, MemoryExchange(), rank=0, world_size=1)
    resuming.attach()
    try:
        trainer._checkpoint_connector.resume_start(None)
    finally:
        resuming.detach()
    return trainer._checkpoint_connector.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


Patch = pytest.MonkeyPatch
Said = pytest.CaptureFixture[str]


def test_a_job_prefers_its_own_checkpoint_in_a_shared_folder(folder: Path, monkeypatch: Patch, capsys: Said) -> None:
    mine, theirs = save(folder, 1), save(folder, 2, job="job theirs")
    assert gone_on_from(folder, monkeypatch) == mine
    said = capsys.readouterr().err
    line = f"{theirs} is skipped: another job saved it (job theirs), and this job has its own checkpoints"
    assert said.count(line) == 1 and f"resuming from {mine}; random" in said
    assert gone_on_from(folder, monkeypatch, "theirs") == theirs


def test_a_newer_modelcheckpoint_file_comes_first(folder: Path, monkeypatch: Patch) -> None:
    save(folder, 1)
    newest = save(folder, 2, job=None)
    assert gone_on_from(folder, monkeypatch) == newest


def test_a_job_without_checkpoints_resumes_from_another_jobs(folder: Path, monkeypatch: Patch, capsys: Said) -> None:
    """A resubmitted job has another job ID."""
    theirs = save(folder, 2, job="SLURM job 4711")
    assert gone_on_from(folder, monkeypatch) == theirs
    assert f"resuming from {theirs}, saved by another job (SLURM job 4711)" in capsys.readouterr().err


def test_damaged_or_foreign_checkpoints_are_skipped_and_kept(folder: Path, monkeypatch: Patch, capsys: Said) -> None:
    good, older = save(folder, 2), save(folder, 1)
    other, cut = save(folder, 3, model="head.weight"), save(folder, 4)
    os.truncate(cut, 300)
    assert gone_on_from(folder, monkeypatch) == good
    said = capsys.readouterr().err
    assert said.count(f"{cut} is skipped: it is truncated or damaged (300 bytes)") == 1
    assert said.count(f"{other} is skipped: it is of another model: it lacks 'weight', it has 'head.weight'") == 1
    assert all(os.path.exists(path) for path in (good, older, other, cut))


def test_a_second_fit_never_resumes_from_an_earlier_step(folder: Path, monkeypatch: Patch, capsys: Said) -> None:
    newest = save(folder, 3, job=None)
    assert gone_on_from(folder, monkeypatch, steps=4) is None
    assert f"{newest} is skipped: it is of step 3, but this Trainer has already made 4 steps" in capsys.readouterr().err
    assert gone_on_from(folder, monkeypatch, steps=3) == newest


def test_another_world_size_restarts_random_numbers(folder: Path, monkeypatch: Patch, capsys: Said) -> None:
    path = save(folder, 1, ranks=2)
    assert gone_on_from(folder, monkeypatch) == path
    assert f"resuming from {path}; random numbers of rank 0 start anew" in capsys.readouterr().err
