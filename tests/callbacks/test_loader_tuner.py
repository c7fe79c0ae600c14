"""The callbacks LoaderTuner and HostPreflight, and two ranks on which both are at work."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DistributedSampler
from tuned_fit import ASKED, EPOCHS, SAMPLES, VALIDATES
from warm import Warm, ranks_of

from lightning_ncclsafe import HostPreflight, LoaderTuner
from lightning_ncclsafe.settings import PreflightSettings, TunerSettings

SCRIPT = Path(__file__).with_name("tuned_fit.py")
FIRST = [("tuned",)]


def test_the_defaults() -> None:
    assert LoaderTuner().settings == TunerSettings(apply=True, apply_to_iterables=False, apply_to_seeded=False)
    assert HostPreflight().settings == PreflightSettings(on_problem="warn", data_dir=None)
    assert HostPreflight(data_dir=Path("data")).settings.data_dir == "data"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("on_problem='stop' is unknown; it must be 'warn' or 'raise'.")):
        HostPreflight(on_problem="stop")  # type: ignore[arg-type]


@pytest.mark.parametrize("callback", [LoaderTuner(), HostPreflight()])
def test_a_stock_strategy_is_refused(callback: Any) -> None:
    trainer: Any = SimpleNamespace(strategy=DDPStrategy())
    with pytest.raises(TypeError, match=r"this Trainer has DDPStrategy\. Use .*SafeDDP"):
        callback.setup(trainer, LightningModule(), "fit")


def run_program(warm: Warm, folder: Path, mode: str) -> Any:
    """What was said, the exit codes, and what each of two ranks has seen."""
    codes, output = warm.run([str(SCRIPT), str(folder), mode], folder, timeout_s=55, envs=ranks_of(2))
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return SimpleNamespace(codes=codes, output=output, ranks=ranks)


def order(rank: int) -> list[float]:
    """The samples of a rank as stock Lightning gives them: shuffled by its DistributedSampler, whose seed is 3."""
    sampler = DistributedSampler(torch.zeros(SAMPLES), num_replicas=2, rank=rank, shuffle=True, seed=3)
    samples: list[float] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        samples += [float(index) for index in sampler]
    return samples


@pytest.mark.program("tuned")
def test_samples_come_in_stock_order(outcome: Any) -> None:
    assert outcome.codes == [0, 0], outcome.output
    for rank, seen in enumerate(outcome.ranks):
        assert seen["samples"] == order(rank)


def most_workers() -> int:
    """What a rank's loader may have of the host: four for each core of its half, and no more than it asks for."""
    return min(4 * len(os.sched_getaffinity(0)) // 2, ASKED)


@pytest.mark.program("tuned")
def test_too_many_workers_are_reduced_from_the_start(outcome: Any) -> None:
    for seen in outcome.ranks:
        assert max(seen["workers"]) == most_workers() + VALIDATES, outcome.output


@pytest.mark.program("tuned")
def test_rank_0_reports_a_changed_worker_count_once(outcome: Any) -> None:
    said = [line for line in outcome.output.splitlines() if "_dataloader: " in line]
    changed = f"num_workers={most_workers()} instead of {ASKED} on every rank: the cores allow no more"
    assert len(said) == (most_workers() < ASKED)
    assert all(changed in line for line in said)


@pytest.mark.program("tuned")
def test_nothing_is_left_behind(outcome: Any) -> None:
    for seen in outcome.ranks:
        assert seen["workers_after"] == 0
        assert seen["threads_after"] == []
        assert seen["loader_after"] == ["DataLoader", True, ASKED, VALIDATES]


@pytest.mark.program("equal")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_seeded_run_with_random_augmentation_matches_stock_weights(outcome: Any, workers: str) -> None:
    assert outcome.codes == [0, 0], outcome.output
    for seen in outcome.ranks:
        weights = seen["weights"][workers]
        assert [kind for kind, _ in weights] == ["stock", "tuned", "tuned", "stock"]
        assert len({digest for _, digest in weights}) == 1, outcome.output
    assert "_dataloader: " not in outcome.output


@pytest.mark.program("raises")
def test_a_run_whose_workers_oversubscribe_its_host_does_not_start(outcome: Any) -> None:
    assert outcome.codes == [3, 3], outcome.output
    for seen in outcome.ranks:
        assert "too-many-workers" in seen["error"] and "20 loader workers" in seen["error"]
        assert seen["samples"] == [] and seen["threads_after"] == []
    assert outcome.ranks[0]["error"] == outcome.ranks[1]["error"]
