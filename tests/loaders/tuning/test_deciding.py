"""Rank 0's part: whose measures it waits for, what it tries when, what it says."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_ncclsafe.loaders.tuning import deciding
from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.deciding import Deciding, LoaderReport, LoaderSetting
from lightning_ncclsafe.loaders.tuning.measuring import Interval, Measurement

BUDGET = Budget(cores=8.0, workers=8, memory_bytes=10**10, shm_bytes=10**9, cores_from="8 cores")
SLOW = Measurement(
    interval=Interval(1), workers=0, batches=100, gap_s=0.01, data_s=4.0, start_s=0.04, cpu_s=0.05, process_bytes=10**8
)


class Job:
    """A job of which this is rank 0."""

    def __init__(self, ranks: int = 2, *, to_seeded: bool = False, budget: Budget = BUDGET) -> None:
        self.said: list[str] = []
        self.ranks = ranks
        self.deciding = Deciding(budget, ranks, applies_to_seeded=to_seeded, say=self.said.append)
        self.epochs = 0

    def begin(self, name: str = "train_dataloader", user_workers: int = 0, **changes: Any) -> None:
        options = {"group": name.partition("[")[0], "why_fixed": "", "forks": True, **changes}
        self.deciding.begin(name, user_workers, **options)

    def measure(
        self, measurement: Measurement, *ranks: int, name: str = "train_dataloader", frozen: bool = False
    ) -> None:
        for rank in ranks or range(self.ranks):
            one = LoaderReport(loader=name, measurements=(measurement,), frozen=frozen)
            self.deciding.add(rank, [one])

    def setting(self, name: str = "train_dataloader") -> LoaderSetting:
        return next(setting for setting in self.deciding.decide().settings if setting.loader == name)

    def train(self, epochs: int = 8, of: Measurement = SLOW, name: str = "train_dataloader") -> LoaderSetting:
        """Epochs that none is tried in."""
        for _ in range(epochs):
            self.epochs += 1
            self.measure(replace(of, interval=Interval(self.epochs)), name=name)
            setting = self.setting(name)
            if setting.trial is not None:
                break
        return setting


def test_more_workers_are_tried_once_all_ranks_have_measured_the_same_epochs() -> None:
    job = Job(ranks=3)
    job.begin()
    for epoch in range(1, 9):
        job.measure(replace(SLOW, interval=Interval(epoch)), 0, 2)
    assert job.setting().trial is None
    for epoch in range(1, 4):
        job.measure(replace(SLOW, interval=Interval(epoch)), 1)
    assert job.setting().trial is None, "the first epoch, and two more, are not enough"
    job.measure(replace(SLOW, interval=Interval(4)), 1)
    trial = job.setting().trial
    assert trial is not None and trial.workers == 4
    assert (trial.interval, job.said) == (Interval(5, 1), [])


def test_an_epoch_with_different_workers_across_ranks_is_ignored() -> None:
    job = Job()
    job.begin()
    for epoch in range(1, 9):
        job.measure(replace(SLOW, interval=Interval(epoch)), 0)
        job.measure(replace(SLOW, interval=Interval(epoch), workers=1), 1)
    assert job.setting().trial is None


def test_a_kept_setting_is_applied_on_all_ranks_and_printed() -> None:
    job = Job()
    job.begin()
    trial = job.train().trial
    assert trial is not None
    tried = replace(SLOW, interval=Interval(6), workers=trial.workers, data_s=0.5, start_s=0.4)
    for measurement in (replace(SLOW, interval=Interval(5)), tried, replace(SLOW, interval=Interval(7))):
        job.measure(measurement)
    setting = job.setting()
    assert (setting.user_workers, setting.workers, setting.trial) == (0, 4, None)
    (line,) = job.said
    assert line.startswith(
        "train_dataloader: num_workers=4 instead of 0 from now on: a step takes 15 ms instead of 50 ms"
    )


@pytest.mark.parametrize(
    ("took_s", "part", "begins"),
    [(1.0, 0, Interval(6, 1)), (20.0, 0, Interval(5, 1)), (120.0, 0, Interval(4, 2)), (20.0, 3, Interval(4, 5))],
)
def test_a_trial_starts_after_all_ranks_have_read_it(took_s: float, part: int, begins: Interval) -> None:
    job = Job()
    job.begin()
    measurement = replace(SLOW, batches=int(took_s / 0.05), data_s=0.04 * int(took_s / 0.05))
    for epoch in (1, 2, 3, 4):
        job.measure(replace(measurement, interval=Interval(epoch, part)))
    trial = job.setting().trial
    # An epoch of a second cannot lose what forking may cost.
    assert trial is None if took_s == 1.0 and trial is None else trial is not None and trial.interval == begins


def test_only_one_loader_is_tried_at_a_time() -> None:
    job = Job()
    job.begin()
    job.begin("val_dataloader")
    assert job.train().trial is not None
    job.epochs = 0
    assert job.train(name="val_dataloader").trial is None


def test_concurrently_read_loaders_share_the_cores() -> None:
    job = Job()
    job.begin("train_dataloader[0]")
    job.begin("train_dataloader[1]", user_workers=6)
    trial = job.train(name="train_dataloader[0]").trial
    assert trial is not None and trial.workers == 2


def test_a_seeded_run_gets_advice_once_and_no_change() -> None:
    job = Job()
    job.begin()
    job.measure(replace(SLOW, interval=Interval(99), seeded=True), 1)
    assert job.train(of=replace(SLOW, seeded=True), epochs=20).trial is None
    (line,) = job.said
    assert line.startswith(
        "train_dataloader: 79 % of each step of 50 ms is waiting for data; num_workers=4 instead of 0"
    )
    assert deciding.SEEDED in line and "LoaderTuner(apply_to_seeded=True)" in line
    assert job.deciding.decide().settled


def test_one_seeded_rank_makes_the_run_seeded() -> None:
    job = Job()
    job.begin()
    for epoch in range(1, 20):
        job.measure(replace(SLOW, interval=Interval(epoch)), 0)
        job.measure(replace(SLOW, interval=Interval(epoch), seeded=True), 1)
        assert job.setting().trial is None


def test_a_seeded_run_is_changed_if_allowed() -> None:
    job = Job(to_seeded=True)
    job.begin()
    assert job.train(of=replace(SLOW, seeded=True)).trial is not None
    assert not job.said and not job.deciding.decide().settled


def test_no_advice_without_a_certain_gain() -> None:
    job = Job()
    job.begin(why_fixed=deciding.ADVICE_ONLY)
    for epoch in range(1, 20):
        job.measure(replace(SLOW, interval=Interval(epoch), data_s=0.2, cpu_s=0.012))
        job.deciding.decide()
    assert not job.said


@pytest.mark.parametrize("why", [deciding.ADVICE_ONLY, deciding.ITERABLE])
def test_advice_is_printed_once_and_changes_nothing(why: str) -> None:
    job = Job()
    job.begin(why_fixed=why)
    for epoch in range(1, 20):
        job.measure(replace(SLOW, interval=Interval(epoch)))
        assert job.deciding.decide().settings == ()
    (line,) = job.said
    assert line.endswith(f"It is not changed: {why}")


def test_a_loader_returned_again_keeps_its_measurements() -> None:
    job = Job()
    job.begin()
    job.train(epochs=3)
    job.begin()
    assert job.train(epochs=1).trial is not None
    job.begin(user_workers=2)
    assert job.setting() == LoaderSetting(loader="train_dataloader", user_workers=2, workers=2)


def test_trials_end_once_a_rank_is_frozen() -> None:
    job = Job()
    job.begin()
    assert job.train().trial is not None
    job.measure(replace(SLOW, interval=Interval(50)), 1, frozen=True)
    decision = job.deciding.decide()
    assert decision.settled and decision.settings[0].trial is None and decision.settings[0].workers == 0


def test_a_rank_without_measurements_does_not_grow_memory() -> None:
    job = Job()
    job.begin()
    for epoch in range(1, 200):
        job.measure(replace(SLOW, interval=Interval(epoch)), 0)
    assert len(job.deciding._loaders["train_dataloader"].measurements[0]) <= 32
