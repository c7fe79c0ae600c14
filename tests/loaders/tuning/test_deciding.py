"""Rank 0's part: whose measures it waits for, what it leaves for whom, what it says."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_ncclsafe.loaders.tuning import deciding
from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import Choice
from lightning_ncclsafe.loaders.tuning.deciding import Deciding
from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.loaders.tuning.messages import AllMeasured, Measured, Setting

BUDGET = Budget(cores=8.0, workers=8, memory_bytes=10**9, shm_bytes=10**9, cores_from="8 cores")
ONE = Choice(workers=1, prefetch=2)
SLOW = Measures(
    workers=1,
    prefetch=2,
    batches=20,
    wall_s=1.0,
    gap_s=0.010,
    wait_s=0.03,
    starved=1.0,
    service_s=0.040,
    service_q97_s=0.045,
    cpu_share=0.2,
    own_cores=0.5,
    batch_bytes=1000,
    worker_bytes=10**6,
)


class Job:
    """A job of which this is rank 0."""

    def __init__(self, ranks: int = 2, budget: Budget = BUDGET) -> None:
        self.said: list[str] = []
        self.deciding = Deciding(budget, ranks, self.said.append)
        self.number = 0

    def begin(self, name: str = "train_dataloader", **changes: Any) -> Choice:
        group = name.partition("[")[0]
        options = {
            "asked": "num_workers=0",
            "group": group,
            "fixed_workers": None,
            "copies": 1,
            "forks": True,
            **changes,
        }
        return self.deciding.begin(name, ONE, **options)

    def measure(self, *ranks: int, of: Measures = SLOW, name: str = "train_dataloader", frozen: bool = False) -> None:
        self.number += 1
        for rank in ranks:
            one = Measured(loader=name, number=self.number, measures=of, frozen=frozen)
            self.deciding.add(rank, AllMeasured(loaders=(one,)))

    def setting(self, name: str = "train_dataloader") -> Setting:
        return next(setting for setting in self.deciding.decide().settings if setting.loader == name)

    def settle(self, name: str = "train_dataloader", of: Measures = SLOW) -> Setting:
        """Ranks that measure what they are set to, until nothing is tried any more."""
        for _ in range(20):
            now = self.setting(name)
            share = max(of.service_s / max(now.workers, 1) - of.gap_s, 0.0)
            fast = {"wait_s": share, "starved": float(share > 0), "batches": int(1 / (of.gap_s + share))}
            self.measure(0, 1, of=replace(of, workers=now.workers, prefetch=now.prefetch, **fast), name=name)
        return self.setting(name)


def test_a_loader_begins_with_one_worker_and_gets_what_it_needs() -> None:
    job = Job()
    assert job.begin() == ONE
    assert (job.setting().workers, job.setting().prefetch) == (1, 2)
    settled = job.settle()
    assert 4 <= settled.workers <= 6
    (line,) = job.said
    assert line.startswith(f"train_dataloader: num_workers={settled.workers}, ")
    assert "(set: num_workers=0)" in line and "expects no waiting" in line


def test_data_that_ends_before_anything_is_settled_is_told_of_too() -> None:
    job = Job()
    job.begin()
    job.begin("val_dataloader")  # of which nothing was measured
    job.measure(0, 1)
    tried = job.setting()
    assert not job.said
    job.deciding.close()
    (line,) = job.said
    assert line.startswith(f"train_dataloader: num_workers={tried.workers}, ") and "this was being tried" in line


def test_what_was_told_is_not_said_again_at_the_end() -> None:
    job = Job()
    job.begin()
    job.settle()
    said = list(job.said)
    job.deciding.close()
    assert job.said == said


def test_it_decides_once_all_ranks_have_measured() -> None:
    job = Job(ranks=3)
    job.begin()
    job.measure(0, 2)
    assert job.setting().workers == 1
    job.measure(0, 1, 2)
    assert job.setting().workers > 1


def test_it_does_not_wait_for_ever_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(ranks=3)
    job.begin()
    job.measure(0, 2)
    assert job.setting().workers == 1
    monkeypatch.setattr(deciding, "_PATIENCE_S", 0.0)
    assert job.setting().workers > 1


def test_the_slowest_rank_decides() -> None:
    alone = Job(ranks=1)
    alone.begin()
    alone.measure(0, of=SLOW)
    job = Job(ranks=2)
    job.begin()
    job.measure(0, of=replace(SLOW, service_s=0.02, service_q97_s=0.02))
    job.number -= 1
    job.measure(1, of=SLOW)
    assert job.setting().workers == alone.setting().workers


def test_what_was_measured_with_another_setting_says_nothing() -> None:
    job = Job()
    job.begin()
    job.measure(0, 1)
    now = job.setting()
    job.measure(0, 1)  # ranks that have not been resized yet
    assert job.setting() == now


def test_a_window_is_used_once() -> None:
    job = Job()
    job.begin()
    job.measure(0, 1)
    now = job.setting()
    assert now.workers > 1
    assert [job.setting() for _ in range(5)] == [now] * 5


def test_loaders_that_are_read_in_turn_may_each_have_all() -> None:
    job = Job(budget=replace(BUDGET, workers=5, cores=5.0))
    for name in ("val_dataloader", "train_dataloader"):
        job.begin(name)
        assert job.settle(name).workers == 5


def test_loaders_that_are_read_at_the_same_time_never_have_more_than_the_budget_together() -> None:
    job = Job(budget=replace(BUDGET, workers=5, cores=5.0))
    names = ("train_dataloader[0]", "train_dataloader[1]", "train_dataloader[2]")
    for name in names:
        job.begin(name)
    for name in names:
        job.settle(name)
        assert sum(setting.workers for setting in job.deciding.decide().settings) <= 5


def test_workers_of_a_loader_that_stays_as_it_is_are_taken_off() -> None:
    job = Job(budget=replace(BUDGET, workers=5, cores=5.0))
    job.begin("val_dataloader", fixed_workers=3)
    job.begin()
    assert job.settle().workers == 2


def test_what_one_loader_holds_in_memory_another_cannot_have() -> None:
    job = Job(budget=replace(BUDGET, memory_bytes=100 * 10**6))
    heavy = replace(SLOW, worker_bytes=15 * 10**6)
    job.begin()
    used = job.settle(of=heavy).workers * heavy.worker_bytes
    assert used <= 100 * 10**6
    job.begin("train_dataloader[1]", group="train_dataloader")
    other = job.settle("train_dataloader[1]", of=heavy)
    assert used + other.workers * heavy.worker_bytes <= 100 * 10**6


def test_advice_is_said_and_changes_nothing() -> None:
    job = Job()
    job.begin(fixed_workers=1, asked="num_workers=1, prefetch_factor=2")
    for _ in range(10):
        job.measure(0, 1)
        assert job.deciding.decide().settings == ()
    (line,) = job.said
    assert "would do (set: num_workers=1, prefetch_factor=2)" in line


def test_a_loader_that_is_given_again_goes_on_where_it_was() -> None:
    job = Job()
    job.begin()
    settled = job.settle()
    assert job.begin().workers == settled.workers
    slower = job.settle(of=replace(SLOW, service_s=0.075, service_q97_s=0.08))
    assert slower.workers > settled.workers, "its windows count on"


def test_a_rank_that_takes_no_settings_any_more_ends_the_trying() -> None:
    job = Job()
    job.begin()
    job.measure(0, 1)
    now = job.setting()
    job.measure(1, frozen=True, of=replace(SLOW, workers=0, prefetch=0))
    job.measure(0, of=replace(SLOW, workers=now.workers, prefetch=now.prefetch))
    decision = job.deciding.decide()
    assert decision.settled and decision.settings == (now,)


def test_a_later_change_is_one_line_that_says_why() -> None:
    job = Job()
    job.begin()
    before = job.settle()
    slower = replace(SLOW, service_s=0.075, service_q97_s=0.08)
    for _ in range(8):
        after = job.settle(of=slower)
    assert after.workers > before.workers
    assert len(job.said) >= 2
    assert f"instead of num_workers={before.workers}" in job.said[1] and ": " in job.said[1].split("instead")[1]
