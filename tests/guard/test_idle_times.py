"""What is unusual is learned from the run: recorded lives of a rank, tick by tick, with a clock of their own."""

from dataclasses import dataclass, field

import pytest

from lightning_ncclsafe.facts import Phase
from lightning_ncclsafe.facts.phase_kinds import LONG_S, PhaseKind
from lightning_ncclsafe.guard.thresholds import EARLY_S, FLOOR_S, Thresholds
from lightning_ncclsafe.settings import check_limits

STEP = PhaseKind(phase=Phase.TRAIN, per_batch=True)
FIRST = PhaseKind(phase=Phase.TRAIN, first=True, per_batch=True)
EPOCH_END = PhaseKind(phase=Phase.TRAIN)
VALIDATION = PhaseKind(phase=Phase.VALIDATE, per_batch=True)
CHECKPOINT = PhaseKind(phase=Phase.CHECKPOINT)
TICK_S = 0.25


@dataclass
class Life:
    """A rank that waits for its peers whenever it stands still; ``asked`` are the moments at which it wonders why."""

    timeout_s: float = 1800.0
    now_s: float = 0.0
    asked: list[tuple[float, PhaseKind]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.patience = Thresholds(check_limits(None, self.timeout_s, "abort"), clock=lambda: self.now_s)

    def stand(self, seconds: float, phase_kind: PhaseKind, batch: int = 0) -> float:
        """Stands still once; returns after how many seconds it asked, 0 if it did not."""
        asked_s, idle_s = 0.0, 0.0
        # It makes progress somewhere between two ticks.
        for tick in range(1, int(seconds / TICK_S) + 2):
            self.now_s += TICK_S
            idle_s = min(tick * TICK_S, seconds)
            self.patience.observe(idle_s, phase_kind, batch)
            if not asked_s and self.patience.is_time_to_look(idle_s, joined=True):
                asked_s = idle_s
                self.asked.append((idle_s, phase_kind))
        self.now_s += TICK_S
        self.patience.observe(0.0, phase_kind, batch)
        return asked_s

    def train(self, steps: int, step_s: float = 0.2, first_s: float = 1.0) -> None:
        """An epoch."""
        self.stand(first_s, FIRST, 0)
        for batch in range(1, steps):
            self.stand(step_s, STEP, batch)


def test_a_stall_of_20_s_in_a_run_of_02_s_steps_is_noticed_after_10_s() -> None:
    life = Life()
    life.train(50)
    assert not life.asked
    assert life.stand(20, STEP, 50) == FLOOR_S == 10


def test_a_few_batches_are_enough_to_know() -> None:
    life = Life()
    life.train(7)
    assert life.stand(20, STEP, 7) == FLOOR_S


def test_before_the_first_batches_are_over_nothing_is_learned() -> None:
    life = Life()
    life.train(3)
    assert life.stand(59, STEP, 3) == 0
    assert life.stand(61, STEP, 4) == 60


def test_a_wait_that_is_usual_for_a_slow_run_is_not_reported() -> None:
    life = Life()
    life.train(30, step_s=25)
    assert life.asked == []
    assert life.stand(99, STEP, 31) == 0
    assert life.stand(101, STEP, 32) == 100


def test_a_garbage_collection_now_and_then_is_not_reported() -> None:
    life = Life()
    for epoch in range(5):
        life.train(40)
        assert life.stand(8, STEP, 40 + epoch) == 0


def test_a_validation_whose_batches_take_ten_times_as_long_as_a_step_is_not_reported() -> None:
    life = Life()
    for _ in range(3):
        life.train(20, step_s=2)
        life.stand(19, PhaseKind(phase=Phase.VALIDATE, first=True, per_batch=True), 0)
        for batch in range(1, 10):
            life.stand(20, VALIDATION, batch)
    assert life.asked == []


def test_a_first_validation_is_given_time_and_a_later_one_is_known() -> None:
    life = Life()
    life.train(50)
    for batch in range(1, 10):
        assert life.stand(20 if batch < 3 else 0.3, VALIDATION, batch) == 0
    assert life.stand(30, VALIDATION, 11) == FLOOR_S


@pytest.mark.parametrize("phase_kind", [FIRST, CHECKPOINT, PhaseKind(phase=Phase.VALIDATE, first=True, per_batch=True)])
def test_what_takes_long_is_looked_at_early(phase_kind: PhaseKind) -> None:
    """Only to see whether it can go on by itself: what is said of it is the reporter's."""
    life = Life()
    life.train(50)
    assert life.stand(19, phase_kind) == 0
    assert life.stand(61, phase_kind) == EARLY_S == 20


@pytest.mark.parametrize("phase_kind", [EPOCH_END, PhaseKind(phase=Phase.INIT)])
def test_elsewhere_ranks_are_asked_after_a_minute_as_ever(phase_kind: PhaseKind) -> None:
    life = Life()
    life.train(50)
    assert life.stand(59, phase_kind) == 0
    assert life.stand(61, phase_kind) == 60


def test_checkpoints_that_take_two_minutes_each_are_soon_known() -> None:
    """Until then all ranks are asked, and what is said of it is the reporter's: nothing."""
    life = Life()
    for _ in range(6):
        life.train(50)
        life.stand(120, CHECKPOINT)
    assert life.asked == [(20.0, CHECKPOINT)] * 3


def test_one_incident_that_recovered_poisons_nothing() -> None:
    life = Life()
    life.train(50)
    assert life.stand(300, STEP, 50) == FLOOR_S
    life.train(50)
    assert life.stand(20, STEP, 50) == FLOOR_S


def test_nor_does_one_that_comes_in_pieces() -> None:
    life = Life()
    life.train(50)
    for piece in range(4):
        life.stand(14, STEP, 51 + piece)
    life.train(50)
    assert life.stand(20, STEP, 60) == FLOOR_S


def test_a_stall_that_recurs_becomes_usual() -> None:
    life = Life()
    noticed = []
    for _ in range(8):
        life.train(300)
        noticed.append(life.stand(20, STEP, 300) > 0)
    assert noticed == [True, True, True, False, False, False, False, False]
    assert life.stand(81, STEP, 301) == 80


def test_a_run_that_gets_slowly_worse_is_asked_at_half_of_the_limit_at_the_latest() -> None:
    life = Life(timeout_s=600)
    life.train(20)
    step_s, batch, asked_s = 1.0, 20, 0.0
    while not asked_s and step_s < 600:
        step_s, batch = step_s * 1.02, batch + 1
        asked_s = life.stand(step_s, STEP, batch)
    assert asked_s == 300


@pytest.mark.parametrize("timeout_s", [1.0, 5.0, 12.0, 60.0])
def test_with_a_short_limit_half_of_it_is_the_most(timeout_s: float) -> None:
    life = Life(timeout_s=timeout_s)
    life.train(20, step_s=0.1, first_s=0.2)
    asked_s = life.stand(timeout_s, STEP, 20)
    assert asked_s == min(timeout_s / 2, FLOOR_S)


def test_what_is_kept_is_bounded() -> None:
    life = Life()
    for batch in range(3000):
        life.stand(1.5, STEP, batch)
    kinds = life.patience._idle_times._kinds
    assert len(kinds) == 1
    assert len(kinds[STEP].lengths_s) == 512


def test_an_explicit_threshold_is_fixed() -> None:
    life = Life()
    life.patience = Thresholds(check_limits(30, 1800, "abort"), clock=lambda: life.now_s)
    life.train(50)
    assert life.stand(29, STEP, 50) == 0
    assert [life.stand(31, CHECKPOINT) for _ in range(6)] == [30] * 6


def test_quiet_lasts_for_its_time_and_no_longer_than_the_standstill() -> None:
    life = Life()
    life.patience.be_quiet_for(LONG_S)
    assert life.patience.is_quiet
    life.now_s += LONG_S
    assert not life.patience.is_quiet
    life.stand(20, STEP)
    life.patience.observe(20.0, STEP, 0)
    life.patience.be_quiet_for(LONG_S)
    life.patience.observe(20.25, STEP, 0)
    assert life.patience.is_quiet
    life.patience.observe(0.1, STEP, 0)
    assert not life.patience.is_quiet
