"""Ranks that are threads: one budget, one setting on all, and nothing left behind."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import living, pids_of_children
from own_threads import own_threads
from polling import until
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange
from lightning_ncclsafe.exchange.interface import SharedMemory
from lightning_ncclsafe.facts import Capacity
from lightning_ncclsafe.loaders.tuning import budget, tuner
from lightning_ncclsafe.loaders.tuning.budget import agree_on_budget, least_budget
from lightning_ncclsafe.loaders.tuning.measuring import Interval
from lightning_ncclsafe.loaders.tuning.tuner import Tuner
from lightning_ncclsafe.loaders.tuning.worker_pool import Deadlines
from lightning_ncclsafe.settings import TunerSettings

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
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


def children() -> int:
    return len(living(pids_of_children(os.getpid())))


class Ranks:
    """Tuners of ranks that share memory."""

    def __init__(self, count: int, capacity: Capacity = HOST, **settings: bool) -> None:
        self.shared = SharedMemory()
        self.said: list[list[str]] = [[] for _ in range(count)]
        self.tuners = [
            Tuner(
                TunerSettings(**settings),
                MemoryExchange(self.shared),
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
    assert own_threads("tuner") == []


def test_the_budget_is_the_smallest_of_all_hosts() -> None:
    small = Capacity(machine="b", cpus=(0, 1, 2), memory_available_bytes=2 * 10**6, shm_free_bytes=10**12)
    budget = least_budget([HOST, HOST, small])
    assert (budget.workers, budget.memory_bytes) == (3, 10**6)
    assert budget.shm_bytes == 10**10 // 4, "half of it, for two ranks"
    assert "3 cores" in budget.cores_from


def test_ranks_of_one_host_share_the_budget() -> None:
    assert least_budget([HOST] * 4).workers == 2
    assert least_budget([Capacity(machine="a", cpus=(0, 1))] * 4).workers == 0


def test_all_ranks_agree_on_one_budget() -> None:
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


def test_a_silent_rank_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "BUDGET_S", 0.05)
    exchange = MemoryExchange()
    agreed = agree_on_budget(exchange, HOST, rank=0, world_size=2, over=threading.Event())
    assert agreed is not None and agreed.workers == 8
    other = MemoryExchange()
    assert agree_on_budget(other, HOST, rank=1, world_size=2, over=threading.Event()) is None


def decide(ranks: Ranks, workers: int, name: str = "train_dataloader") -> None:
    """Rank 0 has found out that a loader is to have so many workers; all ranks know."""
    zero = ranks.tuners[0]
    assert zero._deciding is not None
    with zero._lock:
        zero._deciding._loaders[name].trials.workers = workers

    def is_known(one: Tuner) -> bool:
        one._wake.set()
        setting = one._loaders[name].setting
        return setting is not None and setting.workers == workers

    until(lambda: all(is_known(one) for one in ranks.tuners))


def test_all_ranks_switch_to_the_same_workers_at_an_epoch(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long they may take to start here.
    monkeypatch.setattr(Deadlines, "of_batch", lambda self, *, is_first: 60.0)
    ranks = make(2, Capacity(machine="a", cpus=tuple(range(6))))
    loaders = [DataLoader(Numbers(40, 0), batch_size=4, num_workers=0) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    for tuning, loader in zip(tunings, loaders, strict=True):
        assert tuning is not None
        before = children()
        epoch = tuning(lambda loader=loader: iter(loader))
        seen = next(epoch).tolist()
        assert children() == before
        if loader is loaders[1]:
            decide(ranks, 2)
        seen += [int(sample) for batch in epoch for sample in batch]
        assert seen == list(range(40))
    for tuning in tunings:
        assert tuning is not None
        before = children()
        epoch = tuning(lambda: iter(()))
        seen = next(epoch).tolist()
        assert children() - before == 2
        assert seen + [int(sample) for batch in epoch for sample in batch] == list(range(40))
    assert ranks.said == [[], []]
    assert [loader.num_workers for loader in loaders] == [0, 0]


def test_measurements_reach_rank_0(make: Callable[..., Ranks]) -> None:
    ranks = make(2)
    loaders = [DataLoader(Numbers(40, 0), batch_size=4) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    for _ in range(3):
        for tuning in tunings:
            assert tuning is not None
            assert len(list(tuning(lambda: iter(())))) == 10
    deciding = ranks.tuners[0]._deciding
    assert deciding is not None
    until(lambda: deciding._loaders["train_dataloader"].seen == Interval(2))


def test_too_many_workers_are_reduced_from_the_start(make: Callable[..., Ranks]) -> None:
    ranks = make(2, Capacity(machine="a", cpus=(0, 1)))
    loader = DataLoader(Numbers(8, 0), num_workers=16)
    for one in ranks.tuners:
        (tuning,) = one.take("train_dataloader", [loader])
        assert tuning is not None
        before = children()
        epoch = tuning(lambda: iter(loader))
        assert children() - before == 4, "four workers for the rank's one core"
        assert len(list(epoch)) == 8
        one.take("train_dataloader", [loader])
    (line,) = ranks.said[0]
    assert line == (
        "train_dataloader: num_workers=4 instead of 16 on every rank: the cores allow no more "
        "(2 cores shared by 2 ranks)"
    )
    assert ranks.said[1] == []


def test_concurrently_read_loaders_share_the_budget(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0,)))
    loaders = [DataLoader(Numbers(8, 0), num_workers=count) for count in (3, 1)]
    assert len(ranks.tuners[0].take("train_dataloader", loaders)) == 2
    assert not ranks.said[0]
    ranks.tuners[0].take("train_dataloader", [*loaders, DataLoader(Numbers(8, 0), num_workers=1)])
    assert [line.partition(":")[0] for line in ranks.said[0]] == ["train_dataloader[0]"]


def test_prefetching_is_reduced_and_printed_once_if_memory_is_short(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0,), memory_available_bytes=10 * 32))
    loader = DataLoader(Numbers(40, 0), batch_size=4, num_workers=2, prefetch_factor=50)
    (tuning,) = ranks.tuners[0].take("train_dataloader", [loader])
    assert tuning is not None
    for _ in range(2):
        assert len(list(tuning(lambda: iter(loader)))) == 10
    (line,) = ranks.said[0]
    assert line.startswith(
        "train_dataloader: 5 batches of 32 bytes prefetched instead of 100: limited by memory (half of the "
    )


def test_iterable_datasets_and_other_loaders_are_left_alone(make: Callable[..., Ranks]) -> None:
    ranks = make(1)
    loader = DataLoader(Stream(), num_workers=0)
    watched, nothing = ranks.tuners[0].take("train_dataloader", [loader, [1, 2, 3]])
    assert nothing is None and watched is not None
    assert len(list(watched(lambda: iter(loader)))) == 100


def test_iterable_datasets_are_changed_on_request_and_restored(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0,)), apply_to_iterables=True)
    loader = DataLoader(Stream(), num_workers=6, prefetch_factor=5)
    (tuning,) = ranks.tuners[0].take("train_dataloader", [loader])
    assert (loader.num_workers, loader.prefetch_factor) == (4, 5)
    assert tuning is not None and len(list(tuning(lambda: iter(loader)))) == 400, "each of four yields all"
    ranks.close()
    assert (loader.num_workers, loader.prefetch_factor) == (6, 5)


def test_an_unforkable_dataset_is_left_alone_without_advice(make: Callable[..., Ranks], tmp_path: Path) -> None:
    ranks = make(1, Capacity(machine="a", cpus=tuple(range(8))))
    (tmp_path / "rows").write_text("rows")
    dataset = Numbers(40, 0)
    with (tmp_path / "rows").open("rb") as dataset.file:  # type: ignore[attr-defined]
        loader = DataLoader(dataset, batch_size=4)
        assert ranks.tuners[0].take("train_dataloader", [loader]) == [None]
    assert not ranks.said[0]


def test_advice_only_changes_nothing(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0,)), apply=False)
    loader = DataLoader(Numbers(40, 0), batch_size=4, num_workers=6)
    (tuning,) = ranks.tuners[0].take("train_dataloader", [loader])
    assert tuning is not None
    marker = iter([7, 8, 9])
    assert list(tuning(lambda: marker)) == [7, 8, 9], "the loader's own iterator is read"
    assert loader.num_workers == 6 and not ranks.said[0]


def test_a_tuner_failure_is_printed_once_and_training_continues(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = make(1)
    loader = DataLoader(Numbers(40, 0), batch_size=4)
    (tuning,) = ranks.tuners[0].take("train_dataloader", [loader])
    monkeypatch.setattr(ranks.tuners[0], "_turn", lambda: 1 / 0)
    ranks.tuners[0]._wake.set()
    until(lambda: own_threads("tuner") == [])
    assert tuning is not None and len(list(tuning(lambda: iter(loader)))) == 10
    assert capsys.readouterr().err.count("the tuning of loaders failed and is off") == 1


def test_a_missed_deadline_is_retried(make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(own_threads("tuner")) == 1


def test_an_iterable_dataset_has_one_setting_on_all_ranks_per_epoch(make: Callable[..., Ranks]) -> None:
    ranks = make(2, Capacity(machine="a", cpus=tuple(range(8))), apply_to_iterables=True)
    loaders = [DataLoader(Stream(), num_workers=1) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    decide(ranks, 3)
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


def test_a_rank_that_times_out_cancels_the_change_for_all(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "_EPOCH_S", 0.05)
    ranks = make(2, Capacity(machine="a", cpus=tuple(range(8))), apply_to_iterables=True)
    loaders = [DataLoader(Stream(), num_workers=1) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    decide(ranks, 3)
    for rank in (1, 0):
        tuning = tunings[rank]
        assert tuning is not None
        tuning(lambda: iter(()))
    assert [loader.num_workers for loader in loaders] == [1, 1]


def test_iterable_datasets_stay_unchanged_if_a_rank_is_missing(
    make: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "BUDGET_S", 0.05)
    one_core, exchange = Capacity(machine="a", cpus=(0,)), MemoryExchange()
    alone = Tuner(TunerSettings(apply_to_iterables=True), exchange, rank=0, world_size=2, capacity=one_core)
    alone.start()
    loader = DataLoader(Stream(), num_workers=2)
    alone.take("train_dataloader", [loader])
    assert loader.num_workers == 2
    alone.close()


def test_a_loader_used_in_two_stages_is_restored(make: Callable[..., Ranks]) -> None:
    ranks = make(1, Capacity(machine="a", cpus=(0, 1)), apply_to_iterables=True)
    loader = DataLoader(Stream(), num_workers=20, prefetch_factor=5)
    for stage in ("train_dataloader", "val_dataloader"):
        ranks.tuners[0].take(stage, [loader])
    assert loader.num_workers == 8
    ranks.close()
    assert (loader.num_workers, loader.prefetch_factor) == (20, 5)


def test_epochs_leave_at_most_two_keys(make: Callable[..., Ranks]) -> None:
    ranks = make(2, Capacity(machine="a", cpus=tuple(range(8))), apply_to_iterables=True)
    loaders = [DataLoader(Stream(), num_workers=1) for _ in range(2)]
    tunings = [one.take("train_dataloader", [loader])[0] for one, loader in zip(ranks.tuners, loaders, strict=True)]
    for _ in range(20):
        for tuning in tunings:
            assert tuning is not None
            tuning(lambda: iter(()))
    keys = {key for key in ranks.shared.values if key.startswith("tuning/epoch/")}
    assert keys == {"tuning/epoch/train_dataloader/19", "tuning/epoch/train_dataloader/20"}
