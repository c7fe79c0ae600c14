"""Whether more workers are tried and kept, for simulated loaders of many costs: plain arithmetic, no clock."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightning_ncclsafe.loaders.tuning import deciding
from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.measuring import Interval, Measurement, slowest_of
from lightning_ncclsafe.loaders.tuning.trials import TrialOutcome, Trials

EIGHT = Budget(workers=8, cores=8.0)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What an epoch costs.

    Attributes:
        batches: Of an epoch.
        gap_s: A step without its batch.
        batch_s: What it takes to make a batch.
        computes: Share of ``batch_s`` on a processor; of ``gap_s`` all is.
        start_s: What it takes to start a worker, and to end it.
        handover_s: What the training thread does for a batch of a worker.
        parallel: How many batches can be made at the same time, be there as many workers as there may.
        cores: Cores that there are.
        jitter: Standard deviation of what an epoch takes, as a share.
    """

    batches: int = 40
    gap_s: float = 0.01
    batch_s: float = 0.01
    computes: float = 1.0
    start_s: float = 0.08
    handover_s: float = 0.001
    parallel: float = 64.0
    cores: float = 8.0
    jitter: float = 0.0

    def epoch(self, workers: int, chance: random.Random | None = None) -> Measurement:
        own_s, batch_s = self.gap_s, self.batch_s
        cpu_s = own_s + self.computes * batch_s
        if workers:
            made_s = batch_s / min(workers, self.parallel)
            step_s = max(own_s + self.handover_s, made_s, cpu_s / self.cores)
            start_s = workers * self.start_s + batch_s
            data_s = start_s + (self.batches - 1) * (step_s - own_s)
        else:
            start_s, data_s = batch_s, self.batches * batch_s
        noise = chance.gauss(1, self.jitter) if chance is not None else 1.0
        return Measurement(
            interval=Interval(0),
            workers=workers,
            batches=self.batches,
            gap_s=noise * own_s,
            data_s=noise * data_s,
            start_s=noise * start_s,
            cpu_s=own_s if workers else cpu_s,
        )

    def took_s(self, workers: int) -> float:
        epoch = self.epoch(workers)
        return epoch.batches * epoch.step_s


def train(
    loader_at: Callable[[int], Loader],
    user_workers: int,
    epochs: int,
    *,
    room: Budget | None = None,
    forks: bool = True,
    chance: random.Random | None = None,
) -> tuple[list[int], list[TrialOutcome]]:
    """The workers of each epoch, and what was said. What is decided after an epoch begins with the next but one."""
    trials = Trials(user_workers, forks=forks)
    workers, changes, tried = [], [], None
    setting, trial = user_workers, None
    for epoch in range(1, epochs + 1):
        loader = loader_at(epoch)
        now = setting
        if trial is not None and trial.interval != tried and Interval(epoch) >= trial.interval:
            now, tried = trial.workers, trial.interval
        workers.append(now)
        # By the time at which the next epoch begins, this one has not been decided on.
        setting, trial = trials.workers, trials.trial
        measurement = replace(loader.epoch(now, chance), interval=Interval(epoch))
        space = room or Budget(workers=int(loader.cores), cores=loader.cores)
        change = trials.add(measurement, space, begins=Interval(epoch + 1, 1), may_try=True)
        if change is not None:
            changes.append(change)
    return workers, changes


def worst_of_20(loader_at: Callable[[int], Loader], workers: list[int], user_workers: int) -> float:
    """The most by which any 20 epochs in a row took longer than with what the user has set."""
    tuned = [loader_at(epoch).took_s(count) for epoch, count in enumerate(workers, 1)]
    stock = [loader_at(epoch).took_s(user_workers) for epoch in range(1, len(workers) + 1)]
    starts = range(len(workers) - 19)
    return max(sum(tuned[start : start + 20]) / sum(stock[start : start + 20]) for start in starts)


GRID = [
    dict(zip(("batches", "gap_s", "batch_s", "start_s", "parallel", "cores"), values, strict=True))
    for values in itertools.product(
        (10, 40, 2000),
        (0.001, 0.02),
        (0.001, 0.005, 0.02, 0.3),
        (0.02, 0.2, 8.0),
        (1.0, 64.0),
        (1.0, 2.0, 8.0),
    )
]


@pytest.mark.parametrize("user_workers", [0, 1, 3])
@pytest.mark.parametrize("computes", [0.0, 1.0])
def test_no_20_epochs_are_2_percent_slower_than_the_users_setting(user_workers: int, computes: float) -> None:
    slower, faster = [], 0
    for costs in GRID:
        loader = Loader(computes=computes, **costs)  # type: ignore[arg-type]
        # Workers that take seconds to start are spawned.
        workers, _ = train(lambda _, loader=loader: loader, user_workers, 30, forks=loader.start_s < 1)
        worst = worst_of_20(lambda _, loader=loader: loader, workers, user_workers)
        if worst > 1.02:
            slower.append((costs, worst, workers))
        faster += loader.took_s(workers[-1]) < 0.8 * loader.took_s(user_workers)
    assert not slower, (len(slower), slower[:3])
    assert faster > 10, "many are much faster"


@pytest.mark.parametrize("seed", range(3))
def test_no_20_epochs_are_slower_with_5_percent_jitter(seed: int) -> None:
    chance = random.Random(seed)
    slower = []
    for costs in chance.sample(GRID, 100):
        loader = Loader(jitter=0.05, **costs)  # type: ignore[arg-type]
        workers, _ = train(lambda _, loader=loader: loader, 0, 60, forks=loader.start_s < 1, chance=chance)
        worst = worst_of_20(lambda _, loader=loader: loader, workers, 0)
        if worst > 1.02:
            slower.append((costs, worst, workers))
    assert not slower, (len(slower), slower[:3])


def quiet(loader: Loader, user_workers: int = 0, **options: Any) -> bool:
    workers, changes = train(lambda _: loader, user_workers, 60, **options)
    return set(workers) == {user_workers} and not changes


@pytest.mark.parametrize("gap_s", [0.0001, 0.001, 0.01])
@pytest.mark.parametrize("batches", [40, 10_000])
def test_a_batch_that_costs_a_millisecond_needs_no_worker(gap_s: float, batches: int) -> None:
    assert quiet(Loader(batches=batches, gap_s=gap_s, batch_s=0.001))


def test_no_trial_if_starting_workers_costs_more_than_an_epoch_loses() -> None:
    dear = Loader(gap_s=0.005, batch_s=0.02, start_s=4.0)
    assert quiet(dear, forks=False)
    assert not quiet(replace(dear, batches=10_000), forks=False)


def test_no_trial_without_free_cores() -> None:
    busy = Loader(gap_s=0.01, batch_s=0.05, computes=1.0, cores=1.0, batches=1000)
    assert quiet(busy)
    assert not quiet(replace(busy, computes=0.0, gap_s=0.05))


def test_fast_enough_workers_are_kept() -> None:
    assert quiet(Loader(gap_s=0.01, batch_s=0.015, batches=1000), user_workers=2)


def test_expensive_batches_get_workers_and_keep_them() -> None:
    loader = Loader(gap_s=0.01, batch_s=0.03, batches=400)
    workers, (kept,) = train(lambda _: loader, 0, 15)
    assert workers[:5] == [0] * 5 and workers[-1] == 3
    assert (kept.kind, kept.other.workers) == ("kept", 0)
    line = deciding.changed("train_dataloader", kept)
    assert line.startswith(f"train_dataloader: num_workers={workers[-1]} instead of 0 from now on: a step takes ")
    assert "instead of 40 ms, of which 75 % was waiting for data" in line


def test_a_failed_trial_is_printed_and_not_repeated() -> None:
    locked = Loader(gap_s=0.01, batch_s=0.03, parallel=0.9)
    workers, (failed,) = train(lambda _: locked, 0, 200)
    assert sum(count > 0 for count in workers) == 1
    assert (failed.kind, failed.now.workers) == ("no gain", 0)
    assert "num_workers=0 stays: num_workers=" in deciding.changed("train_dataloader", failed)


def test_a_trial_is_compared_with_the_epochs_before_and_after_it() -> None:
    """Batches that became cheap on their own are not a gain of the workers."""
    dear, cheap = Loader(gap_s=0.01, batch_s=0.03), Loader(gap_s=0.01, batch_s=0.002)
    workers, changes = train(lambda epoch: dear if epoch < 6 else cheap, 0, 30)
    assert [change.kind for change in changes] == ["no gain"]
    assert workers[-1] == 0


def test_a_setting_that_becomes_slower_is_reverted_for_good() -> None:
    first, later = Loader(gap_s=0.01, batch_s=0.03), Loader(gap_s=0.01, batch_s=0.03, parallel=0.5)
    workers, changes = train(lambda epoch: first if epoch < 15 else later, 0, 200)
    assert [change.kind for change in changes] == ["kept", "taken back"]
    assert workers[-1] == 0 and sum(count > 0 for count in workers[20:]) == 0
    assert "num_workers=0 again: with num_workers=" in deciding.changed("train_dataloader", changes[-1])


def test_the_users_worker_count_is_rechecked_now_and_then() -> None:
    """Batches have become cheap with the user's workers, which epochs with other workers do not show."""
    dear, cheap = Loader(gap_s=0.01, batch_s=0.03), Loader(gap_s=0.01, batch_s=0.0001)
    workers, changes = train(lambda epoch: dear if epoch < 15 else cheap, 0, 100)
    assert [change.kind for change in changes] == ["kept", "taken back"]
    assert workers[-1] == 0


def test_rechecking_costs_few_epochs() -> None:
    loader = Loader(gap_s=0.01, batch_s=0.03, batches=400)
    workers, changes = train(lambda _: loader, 0, 400)
    assert len(changes) == 1
    assert sum(count == 0 for count in workers[20:]) <= 4


def test_the_first_epoch_is_ignored() -> None:
    cold, warm = Loader(gap_s=0.01, batch_s=0.5), Loader(gap_s=0.01, batch_s=0.001)
    workers, changes = train(lambda epoch: cold if epoch == 1 else warm, 0, 30)
    assert set(workers) == {0} and not changes


def test_each_added_worker_needs_memory_for_a_process_copy() -> None:
    def workers(memory_bytes: int | None) -> int:
        trials = Trials(0, forks=True)
        measurement = replace(Loader(gap_s=0.01, batch_s=0.03, batches=400).epoch(0), process_bytes=10**9)
        room = replace(EIGHT, memory_bytes=memory_bytes)
        for epoch in range(1, 6):
            trials.add(replace(measurement, interval=Interval(epoch)), room, begins=Interval(9), may_try=True)
        return trials.trial.workers if trials.trial is not None else 0

    assert workers(None) == 3
    assert workers(2 * 10**9) == 2
    assert workers(10**9 - 1) == 0


def test_persistent_workers_are_not_changed() -> None:
    trials = Trials(1, forks=True)
    measurement = replace(Loader(gap_s=0.01, batch_s=0.03).epoch(1), persists=True)
    for epoch in range(1, 10):
        trials.add(replace(measurement, interval=Interval(epoch)), EIGHT, begins=Interval(99), may_try=True)
    assert trials.trial is None


def test_a_trial_read_too_late_still_counts() -> None:
    trials = Trials(0, forks=True)
    measurement = Loader(gap_s=0.01, batch_s=0.03).epoch(0)
    begun = set()
    for epoch in range(1, 100):
        trials.add(replace(measurement, interval=Interval(epoch)), EIGHT, begins=Interval(epoch + 1, 1), may_try=True)
        if trials.trial is not None:
            begun.add(trials.trial.interval)
    assert 1 <= len(begun) <= 10


def test_the_slowest_rank_decides() -> None:
    one = Measurement(interval=Interval(3), workers=1, batches=10, gap_s=0.03, data_s=0.1, cpu_s=0.001, process_bytes=5)
    other = Measurement(interval=Interval(3), workers=1, batches=9, gap_s=0.01, data_s=0.3, seeded=True, batch_bytes=7)
    worst = slowest_of([one, other])
    assert worst == replace(other, cpu_s=0.001, process_bytes=5)
    assert slowest_of([one, replace(other, workers=2)]) is None
