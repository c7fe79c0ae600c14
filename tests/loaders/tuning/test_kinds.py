"""Which loaders are fitted, which are only watched, and which have a seed."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset

from lightning_ncclsafe.loaders.tuning.eligibility import holds_generator, is_seeded
from lightning_ncclsafe.loaders.tuning.kinds import AdvisedLoader, IterableLoader, MapStyleLoader, kind_of
from lightning_ncclsafe.settings import TunerSettings

ALL = TunerSettings(apply=True, apply_to_iterables=True)
ROWS = TensorDataset(torch.zeros(5))


class Lines(IterableDataset[int]):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Guarded(TensorDataset):
    lock: Any = None


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_single_process_dataset_is_left_alone_unless_the_user_has_workers(workers: int) -> None:
    guarded, lines = Guarded(torch.zeros(5)), Lines(lock=threading.Lock())
    guarded.lock = threading.Lock()
    kinds = [kind_of(DataLoader(dataset, num_workers=workers), ALL) for dataset in (guarded, lines)]
    assert kinds == ([None, None] if workers < 2 else [MapStyleLoader, IterableLoader])


def test_a_non_dataloader_is_left_alone() -> None:
    assert kind_of([1, 2], ALL) is None


@pytest.mark.parametrize("settings", [TunerSettings(apply=False, apply_to_iterables=True), TunerSettings(apply=True)])
def test_an_unchangeable_loader_is_only_measured(settings: TunerSettings) -> None:
    assert kind_of(DataLoader(Lines()), settings) is AdvisedLoader


def test_other_loaders_are_tuned() -> None:
    kinds = [kind_of(DataLoader(dataset), ALL) for dataset in (Guarded(torch.zeros(5)), Lines())]
    assert kinds == [MapStyleLoader, IterableLoader]


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    state = torch.get_rng_state()
    torch.seed()
    yield
    torch.set_rng_state(state)


@pytest.mark.usefixtures("unseeded")
def test_seeds_of_lightning_and_torch_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(ROWS)
    assert not is_seeded(loader)
    with monkeypatch.context() as patched:
        patched.setenv("PL_GLOBAL_SEED", "0")
        assert is_seeded(loader)
    assert not is_seeded(loader)
    for seed in (2**32 - 1, -1, -(2**31)):
        torch.manual_seed(seed)
        assert is_seeded(loader)


@pytest.mark.usefixtures("unseeded")
def test_a_user_generator_counts_as_a_seed() -> None:
    generator = torch.Generator()
    assert is_seeded(DataLoader(ROWS, generator=generator))
    assert is_seeded(DataLoader(ROWS, sampler=RandomSampler(ROWS, generator=generator), batch_size=2))
    assert not is_seeded(DataLoader(ROWS, shuffle=True))


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(3), np.random.RandomState(3), random.Random(3), torch.Generator()]
)
def test_a_generator_held_by_a_dataset_is_found(generator: Any) -> None:
    dataset = Guarded(torch.zeros(5))
    assert not holds_generator(Subset(dataset, [1]))
    dataset.lock = [generator]
    assert holds_generator(Subset(dataset, [1]))
