"""A loader whose iteration is replaced stays what it is."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_ncclsafe.facts import DataFacts, EpochEnd, LoaderFacts
from lightning_ncclsafe.loaders import collecting, iteration
from lightning_ncclsafe.loaders.collecting import LoaderCollector
from lightning_ncclsafe.loaders.iteration import Begin, ReplacedIteration, replaceable
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.settings import AgreementSettings


@pytest.fixture
def asked_by_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one of Lightning's loops iterated, and not this test."""
    monkeypatch.setattr(iteration, "_asked_by_a_loop", lambda frame: True)


class OwnLoader(DataLoader[Any]):
    """A user's loader with an attribute, a method and a property of its own."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.colour = "blue"

    @property
    def double(self) -> int:
        return 2 * len(self)


class Slotted:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = [1, 2]

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


class Indexed:
    """Iterable by ``__getitem__`` alone."""

    def __getitem__(self, index: int) -> int:
        return [1, 2][index]


def first_two(begin: Begin) -> Iterator[Any]:
    iterator = begin()
    return iter([next(iterator), next(iterator)])


def loader() -> OwnLoader:
    return OwnLoader(torch.arange(8), batch_size=2)


@pytest.mark.usefixtures("asked_by_a_loop")
def test_only_iteration_and_length_are_replaced() -> None:
    own = loader()
    ReplacedIteration(own, first_two, length=2)
    assert [batch.tolist() for batch in own] == [[0, 1], [2, 3]]
    assert len(own) == 2
    assert isinstance(own, OwnLoader)
    assert (type(own).__name__, type(own).__module__, own.colour, own.double) == ("OwnLoader", __name__, "blue", 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda read: pickle.loads(pickle.dumps(read))])
def test_a_fetcher_in_mid_epoch_can_be_copied(copied: Any) -> None:
    """A Trainer copied in mid-epoch holds iterators of its loaders: here, generators."""
    own = loader()
    ReplacedIteration(own, lambda begin: (batch for batch in begin()))
    combined = CombinedLoader({"a": own})
    fetcher = _DataFetcher()
    fetcher.setup(combined)
    iter(fetcher)
    next(fetcher)
    copied(combined)
    assert [batch["a"].tolist() for batch, _, _ in read_on(fetcher)] == [[2, 3], [4, 5], [6, 7]]


def test_the_length_is_unchanged_by_default() -> None:
    own = loader()
    ReplacedIteration(own, first_two)
    assert len(own) == 4


def test_lightning_does_not_see_a_hidden_length() -> None:
    from lightning.fabric.utilities.data import sized_len

    own = loader()
    ReplacedIteration(own, first_two, hides_length=True)
    assert sized_len(own) is None


@pytest.mark.usefixtures("asked_by_a_loop")
def test_each_epoch_iterates_again() -> None:
    own = loader()
    ReplacedIteration(own, first_two)
    assert [len(list(own)) for _ in range(3)] == [2, 2, 2]


@pytest.mark.usefixtures("asked_by_a_loop")
def test_persistent_workers_are_kept() -> None:
    own = OwnLoader(torch.arange(8), batch_size=2, num_workers=1, persistent_workers=True)
    ReplacedIteration(own, lambda begin: begin())
    assert [batch.tolist() for batch in own] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    workers = own._iterator._workers  # type: ignore[union-attr]
    assert len(list(own)) == 4
    assert own._iterator._workers is workers  # type: ignore[union-attr]
    own._iterator._shutdown_workers()  # type: ignore[union-attr]


def test_the_replacement_can_be_undone() -> None:
    own = loader()
    replaced = ReplacedIteration(own, first_two, length=2)
    replaced.restore()
    assert type(own) is OwnLoader
    assert len(list(own)) == len(own) == 4


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
def test_a_copy_is_a_plain_user_loader(copied: Any) -> None:
    own = loader()
    ReplacedIteration(own, first_two, length=2)
    other = copied(own)
    assert type(other) is OwnLoader
    assert len(list(other)) == 4
    assert other.colour == "blue"


@pytest.mark.parametrize("own", [Slotted(), loader()])
def test_a_replaceable_loader_stays_the_same_object(own: Any) -> None:
    before = type(own)
    assert replaceable(own) is own
    assert type(own) is before


@pytest.mark.parametrize(
    "own", [[1, 2], (1, 2), range(1, 3), iter([1, 2]), (n for n in (1, 2)), {1: 0, 2: 0}, torch.tensor([1, 2])]
)
def test_an_irreplaceable_loader_gets_a_stand_in(own: Any) -> None:
    assert replaceable(own) is not own
    stand_in = replaceable(own)
    assert hasattr(type(stand_in), "__len__") == hasattr(own, "__len__")
    ReplacedIteration(stand_in, lambda begin: begin())
    assert list(stand_in) == [1, 2]
    copy.copy(stand_in)


@pytest.mark.usefixtures("asked_by_a_loop")
def test_an_indexed_loader_gets_a_stand_in() -> None:
    own = replaceable(Indexed())
    assert not isinstance(own, Indexed)
    ReplacedIteration(own, first_two)
    assert list(own) == [1, 2]


def test_a_stand_in_has_the_original_attributes() -> None:
    assert replaceable({1: 0}).get(1) == 0
    with pytest.raises(AttributeError):
        _ = replaceable([1]).nothing


class Fetcher:
    """Begins to read as Lightning's loops do."""

    def __init__(self, loaders: Any, mode: str, fetcher: type = _PrefetchDataFetcher) -> None:
        self.fetcher = fetcher()
        self.fetcher.setup(CombinedLoader(loaders, mode))  # type: ignore[arg-type]
        iter(self.fetcher)

    def read(self) -> list[Any]:
        return [batch for batch, _, _ in read_on(self.fetcher)]


def read_on(fetcher: Any) -> Iterator[Any]:
    while True:
        try:
            yield next(fetcher)
        except StopIteration:
            return


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size", "sequential"])
@pytest.mark.parametrize("fetcher", [_PrefetchDataFetcher, _DataFetcher])
def test_lightning_loops_get_the_agreed_batches(mode: str, fetcher: type) -> None:
    own = loader()
    ReplacedIteration(own, first_two, length=2)
    assert len(Fetcher([own], mode, fetcher).read()) == 2


def test_a_cycled_loader_ends_each_pass_as_agreed() -> None:
    short, long = loader(), OwnLoader(torch.arange(10), batch_size=2)
    ReplacedIteration(short, first_two, length=2)
    batches = Fetcher([short, long], "max_size_cycle").read()
    assert [batch[0].tolist()[0] for batch in batches] == [0, 2, 0, 2, 0]


def test_user_code_sees_the_original_iteration() -> None:
    own = loader()
    ReplacedIteration(own, first_two, hides_length=True)
    assert len(list(own)) == 4
    assert len([*iter(own)]) == 4
    assert len([batch for batch, _, _ in iter(CombinedLoader([own], "sequential"))]) == 4


@pytest.mark.parametrize("by", ["the end", "the next epoch"])
def test_a_loader_that_is_in_a_stage_twice_is_restored(by: str) -> None:
    own = loader()

    class Source:
        name, instance = "val_dataloader", None

        def dataloader(self) -> Any:
            return [own, own]

    def take(stage: str, loaders: list[Any], **_: Any) -> list[Any]:
        return [lambda begin: begin()] * 2 if stage == "val_dataloader" else [None]

    loop = SimpleNamespace(_data_source=Source(), _combined_loader=None)
    fit = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=loop), **vars(loop))
    collector = LoaderCollector(
        trainer=SimpleNamespace(fit_loop=fit, validate_loop=loop, test_loop=loop, predict_loop=loop),
        strategy=None,
        agreement=None,
        settings=AgreementSettings(),
        combined=CombinedLoader,
        tracker=ActionTracker(),
        timeout_s=1.0,
        tuner=SimpleNamespace(take=take),  # type: ignore[arg-type]
    )
    collector.attach()
    for prepared in loop._data_source.dataloader():
        assert collector.prepared(prepared) is own
    assert type(own) is not OwnLoader
    if by == "the end":
        collector.detach()
    else:
        collector.prepared(own)
    assert type(own) is OwnLoader


class Votes:
    """Those of a rank whose data goes on while another's has ended."""

    def start(self, flags: int) -> Any:
        return lambda: flags | 1

    def gather(self, *values: int) -> list[list[int]]:
        return [[*values]]

    def close(self) -> None:
        pass


@pytest.fixture
def voting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[LoaderCollector, Any]]:
    """Makes a loader on whose batches ranks vote, and what has collected it."""

    class Source:
        name, instance = "train_dataloader", None

        def dataloader(self) -> Any:
            return DataLoader([1, 2])  # type: ignore[arg-type]

    data = DataFacts(stage="train_dataloader", loaders=(LoaderFacts(),))
    monkeypatch.setattr(collecting.Stage, "facts", lambda *_: data)
    monkeypatch.setattr(collecting.process_groups, "VoteGroup", lambda *_, **__: Votes())
    agreement = SimpleNamespace(
        compare=lambda *_: (EpochEnd(votes=True),),
        all_can=lambda can: can,
        first_batches=lambda *_: None,
        uneven=lambda *_: ValueError(),
    )
    loop = SimpleNamespace(_data_source=Source(), _combined_loader=None)
    fit = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=loop), **vars(loop))
    collector = LoaderCollector(
        trainer=SimpleNamespace(fit_loop=fit, validate_loop=loop, test_loop=loop, predict_loop=loop),
        strategy=SimpleNamespace(world_size=1),
        agreement=agreement,  # type: ignore[arg-type]
        settings=AgreementSettings(on_uneven="stop_together"),
        combined=CombinedLoader,
        tracker=ActionTracker(),
        timeout_s=1.0,
    )
    collector.attach()
    return lambda: (collector, collector.prepared(loop._data_source.dataloader()))


def test_a_loader_is_not_kept_by_what_has_iterated_it(voting: Callable[[], tuple[LoaderCollector, Any]]) -> None:
    """Its workers end with it, and not whenever the garbage is collected."""
    collector, own = voting()
    kept = weakref.ref(own)
    gc.disable()
    try:
        collector.detach()
        del own
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("asked_by_a_loop")
def test_an_uneven_end_is_told_where_a_path_is_no_text(
    voting: Callable[[], tuple[LoaderCollector, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "data_line", lambda *_, **__: "/home/m\udce9/train.py:8 in __iter__")
    assert [*voting()[1]] == []
