"""Which loaders are fitted, and which are only watched."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ncclsafe.loaders.tuning.fitted import Fitted, FittedAtOnce, FittedByEpoch, kind_of
from lightning_ncclsafe.settings import TunerSettings

ALL = TunerSettings(apply=True, apply_to_iterables=True)


class Lines(IterableDataset[int]):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Guarded(TensorDataset):
    lock: Any = None


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_dataset_that_one_process_alone_can_use_is_watched_until_the_user_has_several(workers: int) -> None:
    guarded, lines = Guarded(torch.zeros(5)), Lines(lock=threading.Lock())
    guarded.lock = threading.Lock()
    kinds = [kind_of(DataLoader(dataset, num_workers=workers), ALL) for dataset in (guarded, lines)]
    assert kinds == ([Fitted, Fitted] if workers < 2 else [FittedAtOnce, FittedByEpoch])


def test_others_are_fitted() -> None:
    kinds = [kind_of(DataLoader(dataset), ALL) for dataset in (Guarded(torch.zeros(5)), Lines())]
    assert kinds == [FittedAtOnce, FittedByEpoch]
