"""Ranks that are threads: one budget, one setting on all, and nothing left behind."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ncclsafe.capacity_facts import Capacity
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange
from lightning_ncclsafe.exchange.memory import SharedMemory
from lightning_ncclsafe.loaders.tuning import agreed_budget, tuner
from lightning_ncclsafe.loaders.tuning.agreed_budget import agree_on_budget, least_budget
from lightning_ncclsafe.loaders.tuning.messages import Setting
from lightning_ncclsafe.loaders.tuning.tuner import Tuner
from lightning_ncclsafe.settings import TunerSettings

HOST = Capacity(machine="a", cpus=tuple(range(8)), memory_available_bytes=10**10, shm_free_bytes=10**10)


class Numbers(Dataset[int]):
    """Samples that take a while."""

    def __init__(self, length: int = 4000, seconds: float = 0.002) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def until(is_so: Callable[[], object]) -> None:
    give_up = time.monotonic() + 45
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def tuner_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ncclsafe-tuner"]


class Ranks:
    """Tuners of ranks that share memory."""

    def __init__(self, count: int, capacity: Capacity = HOST, **settings: bool) -> None:
        shared = SharedMemory()
        self.said: list[list[str]] = [[] for _ in range(count)]
        self.tuners = [
            Tuner(
                TunerSettings(**settings),
                MemoryExchange(shared),
                rank=rank,
                world_size=count,
                capacity=capacity,
                say=self.said[rank].append,
            )
            for rank in range(count)
        ]
        for one in self.tuners:
            one.start()

    def close(self) -> None:
        for one in self.tuners:
            one.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*arguments: Any, **settings: Any) -> Ranks:
        made.append(Ranks(*arguments, **settings))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()
    assert tuner_threads() == []


def test_the_budget_is_the_least_of_all_hosts() -> None:
    small = Capacity(machine="b", cpus=(0, 1, 2), memory_available_bytes=2 * 10**6, shm_free_bytes=10**12)
    budget = least_budget([HOST, HOST, small])
    assert (budget.workers, budget.memory_bytes) == (3, 10**6)
    assert budget.shm_bytes == 10**10 // 4, "half of it, for two ranks"
    assert "3 cores" in budget.cores_from


def test_ranks_of_one_host_share_it() -> None:
    assert least_budget([HOST] * 4).workers == 2
    assert least_budget([Capacity(machine="a", cpus=(0, 1))] * 4).workers == 0


def test_all_ranks_come_to_one_budget() -> None:
    shared, found = SharedMemory(), dict[int, Any]()

    def rank(number: int) -> None:
        own = Capacity(machine=str(number), cpus=tuple(range(number + 1)))
        found[number] = agree_on_budget(MemoryExchange(shared), own, rank=number, world_size=3, over=threading.Event())

    threads = [threading.Thread(target=rank, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] and found[0].workers == 1


def test_a_rank_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed_budget, "BUDGET_S", 0.05)
    exchange = MemoryExchange()
    budget = agree_on_budget(exchange, HOST, rank=0, world_size=2, over=threading.Event())
    assert budget is not None and budget.workers == 8
    other = MemoryExchange()
    assert agree_on_budget(other, HOST, rank=1, world_size=2, over=threading.Event()) is None


def test_both_ranks_get_the_same_workers_and_every_sample_in_its_order(make: Callable[..., Ranks]) -> None:
    ranks = make(2, Capacity(machine="a", cpus=tuple(range(6))))
    loaders = [DataLoader(Numbers(40_000), batch_size=4, num_workers=0) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    assert all(tunings)
    seen: list[list[int]] = [[], []]
    settled = threading.Event()

    def train(rank: int) -> None:
        iterator = tunings[rank](lambda: iter(loaders[rank]))  # type: ignore[misc]
        while not settled.is_set():
            seen[rank] += next(iterator).tolist()
            time.sleep(0.003)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: ranks.said[0])
    finally:
        settled.set()
        for thread in threads:
            thread.join()
    # Of 8 ms a batch and 3 ms a step; of 6 cores each of two ranks has three.
    assert re.search(r"train_dataloader: num_workers=[23], ", ranks.said[0][0])
    assert ranks.said[1] == []
    for samples in seen:
        assert samples == list(range(len(samples))) and len(samples) > 100
    assert [loader.num_workers for loader in loaders] == [0, 0]


def test_a_setting_over_the_budget_is_named_with_its_numbers(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0, 1)))
    with pytest.warns(UserWarning, match="will create 16 worker"):
        loader = DataLoader(Numbers(), num_workers=16)
    ranks.tuners[0].take("train_dataloader", [loader])
    (line,) = ranks.said[0]
    assert "num_workers=16" in line and "2 cores" in line and "get 2 workers together" in line


def test_iterable_datasets_and_what_is_no_dataloader_are_left_alone(make: Callable[..., Ranks]) -> None:
    ranks = make(1)
    loader = DataLoader(Stream(), num_workers=0)
    watched, nothing = ranks.tuners[0].take("train_dataloader", [loader, [1, 2, 3]])
    assert nothing is None and watched is not None
    assert len(list(watched(lambda: iter(loader)))) == 100


def test_iterable_datasets_are_set_where_that_is_asked_for_and_set_back(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0,)), apply_to_iterables=True)
    loader = DataLoader(Stream(), num_workers=2, prefetch_factor=5)
    (tuning,) = ranks.tuners[0].take("train_dataloader", [loader])
    assert (loader.num_workers, loader.prefetch_factor) == (1, 5)
    assert tuning is not None and len(list(tuning(lambda: iter(loader)))) == 100
    ranks.close()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 5)


def test_a_dataset_that_cannot_be_forked_is_left_alone_and_gets_no_advice(
    make: Callable[..., Ranks], tmp_path: Path
) -> None:
    ranks = make(1, Capacity(machine="a", cpus=tuple(range(8))))
    (tmp_path / "rows").write_text("rows")
    dataset = Numbers(40, 0)
    with (tmp_path / "rows").open("rb") as dataset.file:  # type: ignore[attr-defined]
        loader = DataLoader(dataset, batch_size=4)
        assert ranks.tuners[0].take("train_dataloader", [loader]) == [None]
    (line,) = ranks.said[0]
    assert line.startswith("train_dataloader: num_workers=0 is left as it is: ") and "file" in line


def test_advice_only_touches_nothing(make: Callable[..., Ranks]) -> None:
    ranks = make(1, apply=False)
    loader = DataLoader(Numbers(), batch_size=4, num_workers=0)
    (tuning,) = ranks.tuners[0].take("train_dataloader", [loader])
    assert tuning is not None
    iterator = tuning(lambda: iter(loader))
    while not ranks.said[0]:
        next(iterator)
    assert "would do (set: num_workers=0)" in ranks.said[0][0]
    assert loader.num_workers == 0


def test_our_own_failure_is_said_once_and_training_goes_on(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = make(1)
    loader = DataLoader(Numbers(40, 0), batch_size=4)
    (tuning,) = ranks.tuners[0].take("train_dataloader", [loader])
    monkeypatch.setattr(ranks.tuners[0], "_turn", lambda: 1 / 0)
    ranks.tuners[0]._wake.set()
    until(lambda: tuner_threads() == [])
    assert tuning is not None and len(list(tuning(lambda: iter(loader)))) == 10
    assert capsys.readouterr().err.count("the tuning of loaders has failed") == 1


def test_an_exchange_that_misses_a_deadline_is_asked_again(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make(1)
    turns: list[int] = []

    def turn() -> None:
        turns.append(1)
        raise ExchangeError("no answer within 2 s")

    ranks.tuners[0]._has_budget.wait(5)
    monkeypatch.setattr(ranks.tuners[0], "_turn", turn)
    monkeypatch.setattr(tuner, "_POLL_S", 0.0)
    ranks.tuners[0]._wake.set()
    until(lambda: len(turns) >= 2)
    assert tuner_threads() == ["ncclsafe-tuner"]


def children() -> int:
    return sum(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())


def test_workers_of_training_and_of_validation_that_persist_are_there_in_turn(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0,)))
    before = children()
    train = DataLoader(Numbers(400, 0.001), batch_size=4, num_workers=1)
    validate = DataLoader(Numbers(24, 0.001), batch_size=4, num_workers=1, persistent_workers=True)
    (training,) = ranks.tuners[0].take("train_dataloader", [train])
    (validation,) = ranks.tuners[0].take("val_dataloader", [validate])
    assert training is not None and validation is not None
    seen: list[int] = []
    epoch = training(lambda: iter(train))
    for _ in range(3):
        seen += next(epoch).tolist()
        assert children() - before == 1
        assert [int(i) for batch in validation(lambda: iter(validate)) for i in batch] == list(range(24))
        assert children() - before == 1
    assert seen == list(range(12)), "training goes on with the batch that is due"
    ranks.close()
    assert children() == before


def test_an_epoch_of_an_iterable_dataset_has_one_setting_on_all_ranks(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make(2, Capacity(machine="a", cpus=tuple(range(8))), apply_to_iterables=True)
    loaders = [DataLoader(Stream(), num_workers=1) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    zero = ranks.tuners[0]
    monkeypatch.setattr(zero, "_setting_of", lambda name: Setting(loader=name, workers=3, prefetch=2))
    begun: list[int] = []

    def begin(rank: int) -> None:
        tuning = tunings[rank]
        assert tuning is not None
        tuning(lambda: iter(()))
        begun.append(rank)

    waits = threading.Thread(target=begin, args=(1,))
    waits.start()
    assert begun == []
    begin(0)
    waits.join()
    assert [loader.num_workers for loader in loaders] == [3, 3]


def test_a_rank_that_has_waited_for_too_long_decides_for_all_that_nothing_changes(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "_EPOCH_S", 0.05)
    ranks = make(2, Capacity(machine="a", cpus=tuple(range(8))), apply_to_iterables=True)
    loaders = [DataLoader(Stream(), num_workers=1) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    monkeypatch.setattr(ranks.tuners[0], "_setting_of", lambda name: Setting(loader=name, workers=3, prefetch=2))
    for rank in (1, 0):
        tuning = tunings[rank]
        assert tuning is not None
        tuning(lambda: iter(()))
    assert [loader.num_workers for loader in loaders] == [1, 1]


def test_iterable_datasets_stay_as_they_are_where_a_rank_takes_no_part(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreed_budget, "BUDGET_S", 0.05)
    one_core, exchange = Capacity(machine="a", cpus=(0,)), MemoryExchange()
    alone = Tuner(TunerSettings(apply_to_iterables=True), exchange, rank=0, world_size=2, capacity=one_core)
    alone.start()
    loader = DataLoader(Stream(), num_workers=2)
    alone.take("train_dataloader", [loader])
    assert loader.num_workers == 2
    alone.close()


def test_a_loader_that_stands_in_two_stages_is_set_back(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0, 1)), apply_to_iterables=True)
    loader = DataLoader(Stream(), num_workers=2, prefetch_factor=5)
    for stage in ("train_dataloader", "val_dataloader"):
        ranks.tuners[0].take(stage, [loader])
    assert loader.num_workers < 2
    ranks.close()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 5)


def test_epochs_leave_no_more_keys_than_two() -> None:
    shared = SharedMemory()
    one = Tuner(TunerSettings(), MemoryExchange(shared), rank=0, world_size=2, capacity=HOST, say=lambda _: None)
    one._deciding = tuner.Deciding(least_budget([HOST, HOST]), 2, lambda _: None)
    for _ in range(50):
        assert one._setting_of_epoch("train_dataloader") is None
    assert {*shared.values} == {"tuning/epoch/train_dataloader/49", "tuning/epoch/train_dataloader/50"}
