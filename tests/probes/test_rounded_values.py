"""Data that ranks have computed: the same but for rounding is the same, and anything else is not."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from lightning_ncclsafe.facts import DataFacts, LoaderFacts, SamplerFacts
from lightning_ncclsafe.probes.data.fingerprints import fingerprints
from lightning_ncclsafe.rules.kit import JobLoader

X = torch.randn(6_000, 8, generator=torch.Generator().manual_seed(0)) * 3 + 5
LARGE = torch.randn(80_000, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(6_000) % 10
# Two chunks of sums.
LONG = torch.randn(2 * 65_536, generator=torch.Generator().manual_seed(2))


def _facts(dataset: Any, content: str) -> DataFacts:
    prints = fingerprints(dataset, content=content)
    loader = LoaderFacts(
        sampler=SamplerFacts(name="DistributedSampler", replicas=2), fingerprints=prints.found, rounded=prints.rounded
    )
    return DataFacts(stage="train_dataloader", loaders=(loader,))


def are_alike(one: Any, other: Any, content: str = "sample") -> bool:
    loader = JobLoader(0, {0: _facts(one, content), 1: _facts(other, content)})
    (kind,) = set(loader.kinds) & {"values", "names"}
    return not loader.by(lambda facts: facts.fingerprints[kind]).differ


def normalised(x: torch.Tensor, mean: torch.Tensor) -> TensorDataset:
    return TensorDataset((x - mean) / x.std())


@pytest.mark.parametrize("content", ["sample", "full"])
def test_sums_in_another_order_make_no_other_data(content: str) -> None:
    # As on another number of threads.
    one, other = X.mean(), torch.stack([part.sum() for part in X.split(7)]).sum() / X.numel()
    assert one != other, "nothing is rounded differently here"
    assert fingerprints(normalised(X, one), content=content) != fingerprints(normalised(X, other), content=content)
    assert are_alike(normalised(X, one), normalised(X, other), content)


def _less_exact(x: torch.Tensor) -> torch.Tensor:
    """Half of it as by functions of lower accuracy, which errs by 1 in 5,000 either way."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) * 2e-4
    return torch.where(torch.arange(len(x))[:, None] < len(x) // 2, x, x + noise)


ROUNDED: dict[str, tuple[Any, Any]] = {
    "the last bit": (X, X * (1 + 2e-7)),
    "a large tensor": (LARGE, LARGE * (1 + 2e-7)),
    "several chunks": (LONG, LONG * (1 + 2e-7)),
    "lower accuracy": (X, _less_exact(X)),
    "labels beside": (TensorDataset(X, LABELS), TensorDataset(X * (1 + 2e-7), LABELS)),
    "two datasets": (ConcatDataset([[1.0, 2.0], X]), ConcatDataset([[1.0, 2.0], X * (1 + 2e-7)])),
    "numpy": (X.numpy(), np.nextafter(X.numpy(), np.float32(9))),
    "Python's numbers": ([(0.1 + 0.2, 1)], [(0.3, 1)]),
    "names of files beside": ([("/data/a.png", 0.1 + 0.2)], [("/data/a.png", 0.3)]),
    "bfloat16": (X.bfloat16(), torch.where(torch.arange(6_000)[:, None] == 7, X * 1.005, X).bfloat16()),
    "a negative zero": ([0.0, 1.0], [-0.0, 1.0]),
    "missing values": ([math.nan, 0.1 + 0.2], [math.nan, 0.3]),
}


@pytest.mark.parametrize("case", ROUNDED)
def test_rounding_makes_no_other_data(case: str) -> None:
    one, other = ROUNDED[case]
    first, second = (fingerprints(dataset, content="sample").found for dataset in (one, other))
    assert first != second, "nothing is rounded differently here"
    assert are_alike(one, other)
    assert are_alike(other, one)


def _changed(x: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    changed = x.clone()
    change(changed)
    return changed


OTHER: dict[str, tuple[Any, Any]] = {
    "another seed": (LARGE[:6_000], torch.randn(6_000, 8, generator=torch.Generator().manual_seed(4))),
    "another order": (X, X.flip(0)),
    "two rows in another order": (X[:64], X[[1, 0, *range(2, 64)]]),
    "chunks in another order": (LONG, LONG.roll(65_536)),
    "one row of many": (X, _changed(X, lambda x: x[10].neg_())),
    "another scale": (X, X * 1.001),
    "an offset": (X - X.mean(), X - X.mean() + 0.001),
    "another label": (TensorDataset(X, LABELS), TensorDataset(X, _changed(LABELS, lambda one: one[3].add_(1)))),
    "another shape": (X, X.reshape(3_000, 16)),
    "another type": (X, X.double()),
    "datasets in another order": (ConcatDataset([X, X * 2]), ConcatDataset([X * 2, X])),
    "another missing value": ([math.nan, 0.0, 1.0], [0.0, math.nan, 1.0]),
    "another infinite value": ([math.inf, 1.0], [-math.inf, 1.0]),
    "missing values of a tensor": (
        _changed(X, lambda x: x[0, 0].fill_(math.nan)),
        _changed(X, lambda x: x[0, 0].zero_()),
    ),
    "infinite values of a tensor": (
        _changed(X, lambda x: x[0, 0].fill_(math.inf)),
        _changed(X, lambda x: x[0, 0].fill_(-math.inf)),
    ),
    "names of files": ([("/data/a.png", 0.5)], [("/data/b.png", 0.5)]),
    "whole numbers": (LABELS[:, None] + 0, LABELS[:, None].flip(0)),
    "complex numbers": (torch.complex(X, X), torch.complex(X, X * (1 + 2e-7))),
}


@pytest.mark.parametrize("case", OTHER)
def test_other_data_is_other_data(case: str) -> None:
    assert not are_alike(*OTHER[case])


def test_ranks_that_round_alike_are_one_group_whatever_their_order() -> None:
    found = [_facts(one, "sample") for one in (X, X.flip(0), X * (1 + 2e-7), X.flip(0) * (1 + 2e-7))]
    loader = JobLoader(0, dict(enumerate(found)))
    parts = loader.by(lambda facts: facts.fingerprints["values"]).parts
    assert [ranks for _, ranks in parts] == [(0, 2), (1, 3)]


def test_what_was_read_with_older_versions_is_compared_exactly() -> None:
    old = [LoaderFacts(fingerprints={"values": one}) for one in ("a", "b")]
    loader = JobLoader(0, {rank: DataFacts(stage="train_dataloader", loaders=(one,)) for rank, one in enumerate(old)})
    assert loader.by(lambda facts: facts.fingerprints["values"]).differ


def test_batches_are_hashed_without_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ncclsafe.probes.data import plain_values
    from lightning_ncclsafe.probes.data.fingerprints import digest_of_batch

    monkeypatch.setattr(plain_values, "_add_array", None)
    assert digest_of_batch(X[:4]) != digest_of_batch(X[4:8])
