"""Loaders become facts: PyTorch's, Lightning's, Hugging Face's, and whatever else a user may hand over."""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_ncclsafe.facts import LoaderFacts, SamplerFacts
from lightning_ncclsafe.facts.codec import decode, encode
from lightning_ncclsafe.probes.data.loaders import limited, loader_facts
from lightning_ncclsafe.probes.data.random_state import random_states, random_states_kept
from lightning_ncclsafe.probes.data.reading import nested_datasets

DATA = TensorDataset(torch.arange(20.0))


@pytest.fixture(autouse=True)
def _draws_nothing() -> Iterator[None]:
    with random_states_kept():
        np.random.randn()
        before = random_states()
        yield
        assert random_states() == before


def facts_of(loader: Any, limit: int | float | None = None, content: str = "sample") -> LoaderFacts:
    facts = loader_facts(loader, name="train_dataloader", limit=limit, content=content)
    assert decode(LoaderFacts, encode(facts)) == facts
    return facts


class Stream(IterableDataset[Any]):
    def __init__(self, **stored: Any) -> None:
        vars(self).update(stored)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")


class SizedStream(Stream):
    def __len__(self) -> int:
        return 7


class Mine(Sampler[Any]):
    """A sampler that must not be iterated."""

    def __init__(self, **stored: Any) -> None:
        vars(self).update(stored)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")


class MineRandom(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it was iterated")


class MineBatches(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        raise AssertionError("it was iterated")


def test_a_plain_loader_is_fully_described() -> None:
    made = facts_of(DataLoader(Subset(DATA, range(10)), batch_size=4, drop_last=True, num_workers=2, prefetch_factor=3))
    fingerprints = made.fingerprints
    assert set(fingerprints) == {"indices", "values"}
    assert made == LoaderFacts(
        name="train_dataloader",
        loader="DataLoader",
        dataset="Subset",
        datasets=("Subset", "TensorDataset"),
        num_workers=2,
        prefetch_factor=3,
        length=2,
        batches=2,
        samples=10,
        batch_size=4,
        drop_last=True,
        sampler=SamplerFacts(name="SequentialSampler", order="sequential"),
        fingerprints=fingerprints,
        rounded=made.rounded,
    )


def test_batches_made_by_workers_alone_are_recognised() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    class Wrapping(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch + 1 for batch in super().__iter__())

    assert facts_of(DataLoader(Numbers(), num_workers=2)).made_by_workers
    assert not facts_of(DataLoader(Numbers())).made_by_workers
    assert not facts_of(Wrapping(Numbers(), num_workers=2)).made_by_workers
    assert not facts_of(DataLoader(DATA, batch_sampler=MineBatches(range(4), 2, False), num_workers=2)).made_by_workers


def test_content_decides_which_fingerprints_are_made() -> None:
    assert facts_of(DataLoader(DATA), content="off").fingerprints == {}
    assert set(facts_of(DataLoader(DATA), content="full").fingerprints) == {"values", "shapes", "items"}


@pytest.mark.parametrize("limit", [0, 1, 5, 100, 0.0, 0.5, 0.99, 1.0, 3.0])
@pytest.mark.parametrize("length", [0, 3, 7])
def test_the_batch_limit_matches_lightning(length: int, limit: int | float) -> None:
    try:
        expected = _parse_num_batches(RunningStage.TRAINING, length, limit)
    except Exception:
        expected = 0  # Lightning raises later where a share is less than one batch.
    assert limited(length, limit) == expected
    loader = DataLoader(TensorDataset(torch.zeros(length, 1)), sampler=range(length))
    assert facts_of(loader, limit=limit).batches == expected


def test_without_a_limit_or_length_nothing_is_limited() -> None:
    assert limited(7, None) == 7
    assert limited(None, 3) is None
    assert facts_of(DataLoader(DATA), limit=float("nan")).batches is None
    assert facts_of(DataLoader(DATA), limit=float("nan")).problems == (
        "The limit of batches raised ValueError: cannot convert float NaN to integer",
    )


TORCHS: dict[str, tuple[Callable[[], Sampler[Any]], str]] = {
    "sequential": (lambda: SequentialSampler(DATA), "sequential"),
    "random": (lambda: RandomSampler(DATA), "random"),
    "own generator": (lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(1)), ""),
    "subset": (lambda: SubsetRandomSampler([1, 2]), ""),
    "weighted": (lambda: WeightedRandomSampler([1.0, 2.0], 2), ""),
    "derived": (lambda: MineRandom(DATA), ""),
    "user's": (Mine, ""),
}


@pytest.mark.parametrize("case", TORCHS)
@pytest.mark.parametrize("within", [False, True], ids=["sampler", "batch sampler"])
def test_non_distributed_samplers_have_an_order(case: str, within: bool) -> None:
    make, order = TORCHS[case]
    sampler = make()
    loader = (
        DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, True))
        if within
        else DataLoader(DATA, 4, sampler=sampler)
    )
    made = facts_of(loader)
    assert made.sampler == SamplerFacts(name=type(sampler).__name__, order=order)
    assert (made.batch_size, made.drop_last) == (4, within)


def wrapped(kind: Any) -> Any:
    return kind(SequentialSampler(DATA), num_replicas=4, rank=2, seed=5, shuffle=False, drop_last=True)


SPLITTING: dict[str, Callable[[], Any]] = {
    "torch": lambda: DistributedSampler(DATA, 4, 2, shuffle=False, seed=5, drop_last=True),
    "lightning": lambda: wrapped(DistributedSamplerWrapper),
    "unrepeated": lambda: UnrepeatedDistributedSampler(DATA, 4, 2, shuffle=False, seed=5, drop_last=True),
    "unrepeated wrapper": lambda: wrapped(UnrepeatedDistributedSamplerWrapper),
    "user's": lambda: Mine(num_replicas=4, rank=np.int64(2), seed=5, epoch=0, shuffle=False, drop_last=True),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "sampler": lambda sampler: DataLoader(DATA, batch_size=2, sampler=sampler),
    "in batches": lambda sampler: DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False)),
    "in batches of mine": lambda sampler: DataLoader(DATA, batch_sampler=MineBatches(sampler, 2, False)),
    "in batches to predict": lambda sampler: DataLoader(
        DATA, batch_sampler=_IndexBatchSamplerWrapper(BatchSampler(sampler, 2, False))
    ),
    "batch sampler": lambda sampler: DataLoader(DATA, batch_sampler=sampler),
}


@pytest.mark.parametrize("case", SPLITTING)
@pytest.mark.parametrize("place", PLACES)
def test_the_distributed_sampler_is_found(case: str, place: str) -> None:
    sampler = SPLITTING[case]()
    made = facts_of(PLACES[place](sampler)).sampler
    name = type(sampler).__name__
    assert made == SamplerFacts(name=name, replicas=4, rank=2, seed=5, epoch=0, shuffle=False, drop_last=True)


def test_lightnings_predict_wrapper_is_unwrapped() -> None:
    made = facts_of(
        DataLoader(DATA, batch_sampler=_IndexBatchSamplerWrapper(BatchSampler(RandomSampler(DATA), 3, True)))
    )
    assert made.sampler == SamplerFacts(name="RandomSampler", order="random")
    assert (made.batch_size, made.drop_last) == (3, True)


def test_a_distributed_batch_sampler_takes_precedence() -> None:
    batches = MineBatches(DistributedSampler(DATA, 4, 2), 2, False)
    vars(batches).update(num_replicas=8, rank=1)
    made = facts_of(DataLoader(DATA, batch_sampler=batches))
    assert made.sampler == SamplerFacts(name="MineBatches", replicas=8, rank=1, drop_last=False)
    assert (made.batch_size, made.drop_last) == (None, None)


@pytest.mark.parametrize(
    "half", [{"rank": 1}, {"num_replicas": 2}, {"rank": True, "num_replicas": 2}, {"rank": "0"}], ids=str
)
def test_a_sampler_with_only_rank_or_replicas_is_not_distributed(half: dict[str, Any]) -> None:
    made = facts_of(DataLoader(DATA, sampler=Mine(**half, drop_last=True, seed=4))).sampler
    assert made == SamplerFacts(name="Mine", seed=4)


@pytest.mark.parametrize("listed", [[[1, 2], [3]], [1, 2, 3], ((1,), (2,)), []], ids=str)
def test_a_list_of_batches_is_fingerprinted(listed: Any) -> None:
    made = facts_of(DataLoader(DATA, batch_sampler=listed))
    assert made.sampler == SamplerFacts(name=type(listed).__name__, order="listed")
    assert "batches" in made.fingerprints
    assert (made.batch_size, made.drop_last, made.length) == (None, None, len(listed))


@pytest.mark.parametrize("listed", [[3, 1], range(4), np.arange(3), torch.arange(3)], ids=str)
def test_a_list_of_samples_is_fingerprinted(listed: Any) -> None:
    made = facts_of(DataLoader(DATA, sampler=listed))
    assert made.sampler is not None
    assert made.sampler.order == "listed"
    assert "batches" in made.fingerprints


def test_a_list_of_other_objects_is_not_fingerprinted() -> None:
    made = facts_of(DataLoader(DATA, batch_sampler=[["a"], [object()]]))
    assert made.sampler == SamplerFacts(name="list")
    assert set(made.fingerprints) == {"values"}
    assert made.problems == ()


def times(name: str, count: int) -> str:
    return f"{name} \N{MULTIPLICATION SIGN}{count}"


def test_datasets_are_listed_outermost_first() -> None:
    halves = [Subset(DATA, [n]) for n in range(3)]
    names = {
        ("ConcatDataset", times("Subset", 3), times("TensorDataset", 3)): ConcatDataset(halves),
        ("StackDataset", times("Subset", 2), times("TensorDataset", 2)): StackDataset(a=halves[0], b=halves[1]),
        ("ChainDataset", "Stream", "SizedStream"): ChainDataset([Stream(), SizedStream()]),
        ("StackDataset", "TensorDataset", "Subset", "TensorDataset"): StackDataset(DATA, Subset(DATA, range(20))),
    }
    for expected, dataset in names.items():
        assert facts_of(types.SimpleNamespace(dataset=dataset, sampler=[1])).datasets == expected


def test_cyclic_and_numerous_datasets_are_bounded() -> None:
    one, other = Stream(), Stream()
    one.dataset, other.dataset = other, one
    assert facts_of(DataLoader(one)).datasets == (times("Stream", 2),)
    wide: Any = Stream(datasets=[DATA] * 100_000)
    assert facts_of(DataLoader(wide)).datasets == ("Stream", times("TensorDataset", 255), "…")
    every: Any = DATA
    for _ in range(30):
        every = Stream(datasets=[every, every])
    assert len(nested_datasets(every)) <= 256
    mixed: Any = Stream(datasets=[DATA, Stream()] * 50)
    assert facts_of(DataLoader(mixed)).datasets[-2:] == ("TensorDataset", "…")


@pytest.mark.parametrize(("dataset", "length"), [(Stream(), None), (SizedStream(), 7)], ids=["stream", "sized"])
@pytest.mark.parametrize("content", ["sample", "full"])
def test_an_iterable_dataset_is_not_iterated(dataset: Any, length: int | None, content: str) -> None:
    made = facts_of(DataLoader(dataset, batch_size=None), content=content)
    assert (made.iterable, made.length, made.batches, made.samples) == (True, length, length, length)
    assert (made.sampler, made.fingerprints, made.problems) == (None, {}, ())


@pytest.mark.parametrize(
    ("dataset", "all_alike"),
    [
        (TensorDataset(torch.ones(500, 8)), True),
        (TensorDataset(torch.ones(500, 8), torch.zeros(500)), True),
        (Subset(TensorDataset(torch.zeros(6, 8)), [1, 2]), True),
        ([torch.zeros(2)] * 3, True),
        (TensorDataset(torch.ones(500, 8), torch.arange(500)), False),
        (TensorDataset(torch.arange(500.0)), False),
        (TensorDataset(torch.zeros(1, 8)), False),
        ([torch.zeros(2), torch.ones(2)], False),
        ([object(), object()], False),
    ],
    ids=range(9),
)
def test_identical_samples_are_recognised(dataset: Any, all_alike: bool) -> None:
    assert facts_of(DataLoader(dataset)).all_alike is all_alike
    assert not facts_of(DataLoader(dataset), content="off").all_alike


def test_listed_files_count_as_shards() -> None:
    assert facts_of(DataLoader(Stream(urls=["a.tar", "b.tar"]))).shards == 2
    assert facts_of(DataLoader(ChainDataset([Stream(files=["a"]), Stream(paths=["b", "c"])]))).shards == 3
    assert facts_of(DataLoader(DATA)).shards is None


@pytest.mark.parametrize("loader", [[1, 2], (1, 2), range(2)], ids=str)
def test_a_list_is_a_loader(loader: Any) -> None:
    made = facts_of(loader, limit=1, content="full")
    name = type(loader).__name__
    assert (made.loader, made.dataset, made.datasets, made.iterable) == (name, name, (name,), True)
    assert (made.length, made.batches, made.samples, made.sampler) == (2, 1, None, None)
    assert set(made.fingerprints) == {"counts"}


@pytest.mark.parametrize("loader", [(n for n in (1,)), iter([1]), None, object(), 5, Stream, sys], ids=range(7))
def test_a_missing_length_is_not_a_problem(loader: Any) -> None:
    made = facts_of(loader, content="full")
    assert (made.iterable, made.length, made.samples, made.sampler, made.problems) == (True, None, None, None, ())
    if isinstance(loader, Iterator):
        assert list(loader) == [1]


class Sized:
    def __init__(self, length: Callable[[], Any]) -> None:
        self.length = length

    def __len__(self) -> Any:
        return self.length()

    def __getitem__(self, index: int) -> Any:
        return index


def raises(error: Exception) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


LENGTHS: dict[str, tuple[Callable[[], Any], str]] = {
    "negative": (lambda: -1, "ValueError: __len__() should return >= 0"),
    "fraction": (lambda: 2.5, "TypeError: 'float' object cannot be interpreted as an integer"),
    "text": (lambda: "7", "TypeError: 'str' object cannot be interpreted as an integer"),
    "nothing": (lambda: None, "TypeError: 'NoneType' object cannot be interpreted as an integer"),
    "huge": (lambda: 2**64, "OverflowError: cannot fit 'int' into an index-sized integer"),
    "raises": (raises(ValueError("no\nidea")), "ValueError: no idea"),
    "raises in silence": (raises(KeyError()), "KeyError."),
    "raises at length": (raises(OSError("x" * 1_000)), "OSError: " + "x" * 200 + "…"),
    "unprintable": (raises(Unprintable()), "Unprintable."),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_an_invalid_length_is_a_problem(case: str) -> None:
    length, said = LENGTHS[case]
    made = facts_of(Sized(length), limit=3)
    assert (made.length, made.batches) == (None, None)
    assert made.problems == (f"len(loader) raised {said}",)
    made = facts_of(DataLoader(Sized(length), sampler=[0]))
    assert (made.length, made.samples) == (1, None)
    assert made.problems == (f"len(dataset) raised {said}",)


@pytest.mark.parametrize(
    "length", [raises(TypeError("no len")), raises(NotImplementedError())], ids=["type", "not made"]
)
def test_raising_type_error_for_a_length_is_not_a_problem(length: Callable[[], Any]) -> None:
    assert facts_of(Sized(length)).problems == ()
    assert facts_of(DataLoader(Sized(length), sampler=[0])).samples is None


def test_a_length_of_true_counts_as_one() -> None:
    assert facts_of(Sized(lambda: True)).length == 1


def test_raising_properties_are_problems() -> None:
    names = ("dataset", "sampler", "batch_sampler", "num_workers", "prefetch_factor", "batch_size", "drop_last")
    broken = type("Broken", (), {name: property(lambda self: 1 / 0) for name in names})
    made = facts_of(broken(), content="full")
    assert made.loader == "Broken"
    assert sorted(made.problems) == sorted(
        f"loader.{name} raised ZeroDivisionError: division by zero" for name in names
    )


def test_a_sampler_with_raising_properties_is_still_named() -> None:
    broken = type("Broken", (Mine,), {name: property(lambda self: 1 / 0) for name in ("rank", "num_replicas", "seed")})
    made = facts_of(DataLoader(DATA, sampler=broken()))
    assert made.sampler == SamplerFacts(name="Broken")
    assert "sampler.rank raised ZeroDivisionError: division by zero" in made.problems


def test_attributes_of_wrong_types_are_left_out() -> None:
    loader = types.SimpleNamespace(
        dataset=DATA,
        sampler=Mine(),
        batch_sampler=None,
        num_workers="2",
        prefetch_factor=2.0,
        batch_size=10**30,
        drop_last=1,
    )
    made = facts_of(loader)
    assert (made.num_workers, made.prefetch_factor, made.batch_size, made.drop_last) == (0, None, None, None)


class Wild:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Endless:
    def __getattr__(self, name: str) -> Any:
        return Endless()


@pytest.mark.parametrize("kind", [Wild, Endless])
@pytest.mark.parametrize("content", ["sample", "full", "off"])
def test_no_object_causes_an_error(kind: type, content: str) -> None:
    wild = kind()
    places = (wild, types.SimpleNamespace(dataset=wild, sampler=wild, batch_sampler=wild))
    for loader in (*places, DataLoader(Sized(lambda: 3), sampler=wild), [wild]):
        assert facts_of(loader, content=content).name == "train_dataloader"


def test_the_loader_is_unchanged() -> None:
    loader = DataLoader(Subset(DATA, range(10)), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    before = dict(vars(loader))
    facts_of(loader, content="full")
    assert vars(loader) == before


class TestHuggingFace:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        self.library = pytest.importorskip("datasets")

    def table(self) -> Any:
        return self.library.Dataset.from_dict({"x": list(range(40))})

    def test_a_table_is_indexed(self) -> None:
        made = facts_of(DataLoader(self.table().shuffle(seed=1), batch_size=4))
        assert (made.iterable, made.datasets, made.samples, made.length, made.shards) == (
            False,
            ("Dataset",),
            40,
            10,
            None,
        )
        assert set(made.fingerprints) == {"indices", "values"}

    def test_an_iterable_dataset_has_shards(self) -> None:
        made = facts_of(DataLoader(self.table().to_iterable_dataset(num_shards=4)), content="full")
        assert (made.iterable, made.length, made.samples, made.shards, made.sampler) == (True, None, None, 4, None)
        assert made.problems == ()

    def test_a_split_by_node_counts_as_a_sampler(self) -> None:
        split = pytest.importorskip("datasets.distributed").split_dataset_by_node
        streamed = split(self.table().to_iterable_dataset(num_shards=4), rank=1, world_size=2)
        made = facts_of(DataLoader(streamed))
        assert made.sampler == SamplerFacts(name="split_dataset_by_node", replicas=2, rank=1)
        assert made.shards == 2

    def test_a_user_class_of_the_same_name_is_not_mistaken(self) -> None:
        own = type("IterableDataset", (Dataset,), {"__module__": "datasets.mine", "__len__": lambda self: 3})
        own.num_shards = property(raises(AssertionError("it was run")))
        made = facts_of(DataLoader(own()))
        assert (made.iterable, made.shards, made.problems) == (False, None, ())


class Uncounted(IterableDataset[int]):
    def __len__(self) -> int:
        raise TypeError("nobody has counted")  # <- no length

    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_the_users_line_without_a_length_is_known() -> None:
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    line = next(number for number, text in lines if text.endswith("# <- no length"))
    assert facts_of(DataLoader(Uncounted())).no_length_at == f"{__file__}:{line} in __len__"
    assert facts_of(DataLoader(DATA)).no_length_at == ""
    assert facts_of(DataLoader(ChainDataset([]))).no_length_at == "", "PyTorch's own line"
