"""Data that ranks have computed: the same but for rounding is the same, and anything else is not."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from lightning_ncclsafe.facts import DataFacts, LoaderFacts, SamplerFacts
from lightning_ncclsafe.facts.codec import decode, encode
from lightning_ncclsafe.probes.data.fingerprints import fingerprints
from lightning_ncclsafe.rules.kit import JobLoader


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = drawn(0, 6_000, 8) * 3 + 5
LARGE = drawn(1, 80_000, 8)
# Two chunks of sums.
LONG = drawn(2, 2 * 65_536)
IMAGES = drawn(3, 1_000, 64).abs() * 255
LABELS = torch.arange(6_000) % 10
LAST_BIT = 1 + 2e-7
WITH_CONSTANT = torch.cat([X, torch.full((len(X), 1), 0.1)], 1)
LATE = 1.7e9 + 0.001 * torch.arange(1_000).double()


def _facts(dataset: Any, content: str) -> DataFacts:
    prints = fingerprints(dataset, content=content)
    assert not prints.problems
    loader = LoaderFacts(
        sampler=SamplerFacts(name="DistributedSampler", replicas=2), fingerprints=prints.found, rounded=prints.rounded
    )
    assert decode(LoaderFacts, encode(loader)) == loader
    return DataFacts(stage="train_dataloader", loaders=(loader,))


def are_alike(one: Any, other: Any, content: str = "sample") -> bool:
    loader = JobLoader(0, {0: _facts(one, content), 1: _facts(other, content)})
    (kind,) = set(loader.kinds) & {"values", "names"}
    return len({*loader.prints(kind).values()}) == 1


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
    """Half of it as by functions of lower accuracy, which err by 1 in 5,000 either way."""
    return torch.where(torch.arange(len(x))[:, None] < len(x) // 2, x, x + drawn(4, *x.shape) * 2e-4)


ROUNDED: dict[str, tuple[Any, Any]] = {
    "the last bit": (X, X * LAST_BIT),
    "a large tensor": (LARGE, LARGE * LAST_BIT),
    "several chunks": (LONG, LONG * LAST_BIT),
    "lower accuracy": (X, _less_exact(X)),
    "double precision": (X.double() / 3, X.double() * (1 / 3)),
    "few numbers": (torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.1, 0.2, 0.3]) * LAST_BIT),
    "labels beside": (TensorDataset(X, LABELS), TensorDataset(X * LAST_BIT, LABELS)),
    "two datasets": (ConcatDataset([[1.0, 2.0], X]), ConcatDataset([[1.0, 2.0], X * LAST_BIT])),
    "numpy": (X.numpy(), np.nextafter(X.numpy(), np.float32(9))),
    "an offset": (X + 1_000, (X + 1_000) * LAST_BIT),
    "single precision, kept in double": ((X * 0.3).double(), (X * 0.3 * LAST_BIT).double()),
    "columns of other scales": (X * 10.0 ** torch.arange(8), X * 10.0 ** torch.arange(8) * LAST_BIT),
    "a constant column": (WITH_CONSTANT, WITH_CONSTANT * LAST_BIT),
    "not side by side": (X.T, X.T * LAST_BIT),
    "with a gradient": (X.clone().requires_grad_(), X * LAST_BIT),
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


def _mixed(x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(5))]


def _with_time(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([1.7e9 + 60.5 * torch.arange(len(x))[:, None], x.double()], 1)


def _beside(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([60.5 * torch.arange(float(len(x)))[:, None], x], 1)


def _labelled(seed: int) -> torch.Tensor:
    labels = drawn(seed, 2_000, 1) > 0
    return torch.cat([drawn(9, 2_000, 8) * 1e4, labels.float()], 1)


def _turned(x: torch.Tensor, one: int, other: int, count: int = 500) -> torch.Tensor:
    """The same numbers, some of which have changed places; none of these is among the samples."""
    turned = x.clone()
    turned[one : one + count], turned[other : other + count] = x[other : other + count], x[one : one + count]
    return turned


WHOLE = torch.arange(4_000.0)
HIGH = torch.finfo(torch.float64).max

OTHER: dict[str, tuple[Any, Any]] = {
    "another seed": (X, drawn(6, 6_000, 8) * 3 + 5),
    "another order": (X, X.flip(0)),
    "another order around zero": (LONG[:100], _mixed(LONG[:100])),
    "two rows in another order": (X[:64], X[[1, 0, *range(2, 64)]]),
    "chunks in another order": (LONG, LONG.roll(65_536)),
    "some in another order": (LONG[:60_000], _turned(LONG[:60_000], 10_000, 31_000)),
    "some of two chunks": (LONG, _turned(LONG, 1_000, 1_000 + 65_536)),
    "little, in double precision": (X.double() / 3, X.double() / 3 * (1 + 1e-6)),
    "another dataset beside": (ConcatDataset([[1.0, 2.0], X]), ConcatDataset([[1.5, 2.0], X * LAST_BIT])),
    "one row of many": (X, _changed(X, lambda x: x[10].neg_())),
    "another scale": (X, X * 1.001),
    "another sign": (torch.tensor([5.5, 1.0, 1.0]), torch.tensor([-5.5, 1.0, 1.0])),
    "an offset": (X - X.mean(), X - X.mean() + 0.01),
    "around an offset": (drawn(7, 100_000) + 1_000, drawn(8, 100_000) + 1_000),
    "another order around an offset": (drawn(7, 9_000) + 1_000, _mixed(drawn(7, 9_000) + 1_000)),
    "beside the time": (_with_time(X[:2_000]), _with_time(X[2_000:4_000])),
    "beside a large column": (_beside(drawn(7, 4_096, 7)), _beside(drawn(8, 4_096, 7))),
    "labels beside large columns": (_labelled(0), _labelled(1)),
    "around a large offset": (101_325 + 0.2 * drawn(7, 5_000), 101_325 + 0.2 * drawn(8, 5_000)),
    "a little later": (LATE, LATE + 1),
    "another constant": (torch.full((9,), 0.1), torch.full((9,), 0.2)),
    "another time": (1.7e9 + 60.5 * torch.arange(4_000).double(), 1.7e9 + 60.5 * torch.arange(4_000, 8_000).double()),
    "numbers beside images": (
        TensorDataset(IMAGES, drawn(9, 1_000) * 0.01),
        TensorDataset(IMAGES, _mixed(drawn(9, 1_000) * 0.01)),
    ),
    "whole numbers beside images": (
        TensorDataset(IMAGES, LABELS[:1_000].float()),
        TensorDataset(IMAGES, _mixed(LABELS[:1_000].float())),
    ),
    "whole numbers": (WHOLE, _changed(WHOLE, lambda x: x[7].add_(1))),
    "another label": (TensorDataset(X, LABELS), TensorDataset(X, _changed(LABELS, lambda one: one[3].add_(1)))),
    "another shape": (X, X.reshape(3_000, 16)),
    "another type": (X, X.double()),
    "datasets in another order": (ConcatDataset([X, X * 2]), ConcatDataset([X * 2, X])),
    "a list": ([0.1 + 0.2], [0.3]),
    "a list of numpy's numbers": (list(X[:, 0].numpy()), list(_mixed(X[:, 0]).numpy())),
    "arrays in rows": ([(x, 0.5) for x in X[:9]], [(x * LAST_BIT, 0.5) for x in X[:9]]),
    "half precision": (X.half(), (X * 1.01).half()),
    "missing values": (_changed(X, lambda x: x[0, 0].fill_(math.nan)), _changed(X, lambda x: x[0, 0].zero_())),
    "infinite values": (
        _changed(X, lambda x: x[0, 0].fill_(math.inf)),
        _changed(X, lambda x: x[0, 0].fill_(-math.inf)),
    ),
    "sums that have no end": (
        torch.tensor([HIGH, HIGH, 1.5], dtype=torch.float64),
        torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64),
    ),
    "complex numbers": (torch.complex(X, X), torch.complex(X, X * LAST_BIT)),
}


@pytest.mark.parametrize("case", OTHER)
@pytest.mark.filterwarnings("error")
def test_other_data_is_other_data(case: str) -> None:
    assert not are_alike(*OTHER[case])


@pytest.mark.parametrize("rows", [torch.zeros(0, 3), torch.tensor(1.5), np.zeros((0,)), np.array(["a"])])
def test_nothing_is_added_up_of_what_has_no_rows_or_no_numbers(rows: Any) -> None:
    assert fingerprints(TensorDataset(torch.ones(3), torch.ones(3)), content="sample").rounded is None
    made = fingerprints(rows, content="sample")
    assert (made.rounded, made.problems) == (None, ())


def _loader(*datasets: Any) -> JobLoader:
    return JobLoader(0, {rank: _facts(one, "sample") for rank, one in enumerate(datasets)})


def test_ranks_that_round_alike_are_one_group_whatever_their_order() -> None:
    prints = _loader(X, X.flip(0), X * LAST_BIT, X.flip(0) * LAST_BIT).prints("values")
    assert prints[0] == prints[2] != prints[1] == prints[3]


def test_of_many_shards_those_are_compared_that_have_the_same_shape() -> None:
    shards = [X[: 100 + number] for number in range(12)]
    prints = _loader(*shards, *(shard * LAST_BIT for shard in shards)).prints("values")
    assert all(prints[rank] == prints[rank + 12] for rank in range(12))
    assert len({*prints.values()}) == 12


def test_what_was_read_with_older_versions_is_compared_exactly() -> None:
    facts = {rank: _facts(one, "sample") for rank, one in enumerate((X, X * LAST_BIT))}
    old = replace(facts[1], loaders=(replace(facts[1].loaders[0], rounded=None),))
    for other, count in ((facts[1], 1), (old, 2)):
        assert len({*JobLoader(0, {0: facts[0], 1: other}).prints("values").values()}) == count
