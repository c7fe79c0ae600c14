"""Phases as they change, and the steps they make, from the names that Lightning gives its profiler."""

import itertools
import time
from collections.abc import Callable

import pytest

from lightning_ncclsafe.collectives import trail as trail_module
from lightning_ncclsafe.collectives.trail import Trail
from lightning_ncclsafe.phases import PhaseTracker
from lightning_ncclsafe.timing.step_phases import STEP_PHASES, StepPhase, step_phase

MS = 1_000_000
NEXT = "[_TrainingEpochLoop].train_dataloader_next"
BACKWARD = "[Strategy]SafeDDP.backward"


def phases(trail: Trail) -> list[StepPhase]:
    """Those that have ended, and the one that goes on."""
    return [STEP_PHASES[phase] for _, phase in [*trail.marks, trail.current]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Each look at the clock is a millisecond later than the last, or as much as the test says."""
    ticks = itertools.count()
    monkeypatch.setattr(trail_module, "time_ns", lambda: next(ticks) * MS)

    def every_ns(step_ns: int) -> None:
        monkeypatch.setattr(trail_module, "time_ns", lambda: 1000 * MS + next(ticks) * step_ns)

    return every_ns


def test_a_phase_is_written_down_when_it_changes(clock: Callable[[int], None]) -> None:
    trail = Trail()
    for action in (NEXT, "[Strategy]SafeDDP.batch_to_device", "[Strategy]SafeDDP.training_step", BACKWARD, "", ""):
        trail(action)
    assert phases(trail) == [StepPhase.OTHER, StepPhase.DATA, StepPhase.COMPUTE]
    times = [at_ns for at_ns, _ in [*trail.marks, trail.current]]
    assert times == sorted({*times})


def test_what_is_between_two_hooks_belongs_to_the_first(clock: Callable[[int], None]) -> None:
    trail = Trail()
    for action in (NEXT, "", "run_training_batch", BACKWARD, "", NEXT, ""):
        trail(action)
    assert phases(trail) == [StepPhase.OTHER, StepPhase.DATA, StepPhase.COMPUTE, StepPhase.DATA]


def test_what_took_next_to_no_time_counts_with_what_was_before(clock: Callable[[int], None]) -> None:
    trail = Trail()
    trail(NEXT)
    trail(BACKWARD)
    clock(10_000)
    for action in ("[LightningModule]Net.on_train_batch_end", NEXT, "save_checkpoint"):
        trail(action)
    clock(MS)
    trail(BACKWARD)
    assert phases(trail) == [
        StepPhase.OTHER,
        StepPhase.DATA,
        StepPhase.COMPUTE,
        StepPhase.CHECKPOINT,
        StepPhase.COMPUTE,
    ]


def test_times_are_those_of_the_wall_clock() -> None:
    began_ns, trail = time.time_ns(), Trail()
    trail(NEXT)
    assert began_ns <= trail.current[0] <= time.time_ns()
    assert began_ns <= trail.starts[0] <= time.time_ns()


@pytest.mark.parametrize(
    "action",
    [
        NEXT,
        "[_EvaluationLoop].val_next",
        "[_EvaluationLoop].test_next",
        "[_PredictionLoop].predict_next",
        "[_TrainingEpochLoop].val_dataloader_next",
    ],
)
def test_a_step_begins_when_a_batch_is_fetched(action: str) -> None:
    trail = Trail()
    for _ in range(3):
        trail(action), trail(""), trail(BACKWARD), trail("")
    assert len(trail.starts) == 3


def test_it_hears_of_a_trackers_actions(clock: Callable[[int], None]) -> None:
    tracker, trail = PhaseTracker(), Trail()
    tracker.listeners += (trail,)
    for _ in range(3):
        with tracker.action("run_training_epoch"):
            with tracker.action(NEXT):
                pass
            with tracker.action(BACKWARD):
                pass
    assert len(trail.starts) == 3
    assert phases(trail) == [StepPhase.OTHER, *[StepPhase.DATA, StepPhase.COMPUTE] * 3]


def test_what_happens_within_a_fetch_makes_no_further_step() -> None:
    tracker, trail = PhaseTracker(), Trail()
    tracker.listeners += (trail,)
    for _ in range(3):
        with tracker.action(NEXT), tracker.action("[Callback]Mine.on_fetch"):
            pass
    assert len(trail.starts) == 3


def test_a_fetch_after_something_outside_of_it_is_a_step_of_its_own() -> None:
    trail, inner = Trail(), "[Callback]Mine.on_fetch"
    for action in (NEXT, inner, NEXT, inner, NEXT):
        trail(action)
    assert len(trail.starts) == 1, "within"
    for action in ("", NEXT, inner, "", NEXT, "run_training_batch", NEXT):
        trail(action)
    assert len(trail.starts) == 4


def test_50_microseconds_are_no_longer_short(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]
    monkeypatch.setattr(trail_module, "time_ns", lambda: now_ns[0])
    trail = Trail()
    for at_ns, action in ((50_000, NEXT), (99_999, BACKWARD), (149_999, NEXT)):
        now_ns[0] = at_ns
        trail(action)
    assert [STEP_PHASES[phase] for _, phase in trail.marks] == [StepPhase.OTHER, StepPhase.COMPUTE]
    assert trail.current == (149_999, STEP_PHASES.index(StepPhase.DATA)), "it goes on"


def test_nobody_who_reads_is_no_reason_to_grow(clock: Callable[[int], None]) -> None:
    trail = Trail()
    for _ in range(70_000):
        trail(NEXT), trail(BACKWARD), trail("")
    assert len(trail.marks) == len(trail.starts) == 1 << 16
    assert len(trail._meanings) == 3


def test_an_action_costs_about_a_microsecond() -> None:
    trail, best_s = Trail(), 1.0
    actions = [NEXT, "", BACKWARD, "", "[LightningModule]Net.on_train_batch_end"] * 1000
    for _ in range(5):
        began = time.perf_counter()
        for action in actions:
            trail(action)
        best_s = min(best_s, time.perf_counter() - began)
    assert best_s / len(actions) < 5e-6


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        ("", StepPhase.OTHER),
        ("run_training_batch", StepPhase.OTHER),
        (NEXT, StepPhase.DATA),
        ("[Strategy]SafeDDP.batch_to_device", StepPhase.DATA),
        ("[LightningModule]Net.transfer_batch_to_device", StepPhase.DATA),
        ("[LightningDataModule]Data.train_dataloader", StepPhase.DATA),
        ("[Strategy]SafeDDP.training_step", StepPhase.COMPUTE),
        (BACKWARD, StepPhase.COMPUTE),
        ("[LightningModule]Net.optimizer_step", StepPhase.OPTIMIZER),
        ("[LightningModule]Net.optimizer_zero_grad", StepPhase.OPTIMIZER),
        ("[LightningModule]Net.configure_gradient_clipping", StepPhase.OPTIMIZER),
        ("[LightningModule]Net.lr_scheduler_step", StepPhase.OPTIMIZER),
        ("[Strategy]SafeDDP.validation_step", StepPhase.VALIDATION),
        ("[_EvaluationLoop].val_next", StepPhase.VALIDATION),
        ("[LightningModule]Net.on_validation_epoch_end", StepPhase.VALIDATION),
        ("[Strategy]SafeDDP.test_step", StepPhase.VALIDATION),
        ("save_checkpoint", StepPhase.CHECKPOINT),
        ("[Callback]ModelCheckpoint{'monitor': 'val_loss'}.on_train_batch_end", StepPhase.CHECKPOINT),
        ("log_metrics", StepPhase.LOGGING),
        ("[LightningModule]Net.on_train_batch_end", StepPhase.HOOKS),
        ("[Callback]EarlyStopping{'monitor': 'validation_loss', 'mode': 'min'}.on_train_epoch_end", StepPhase.HOOKS),
        ("[Callback]TQDMProgressBar.on_train_batch_start", StepPhase.HOOKS),
        ("[LightningModule]Net.on_before_backward", StepPhase.HOOKS),
        ("[LightningModule]Net.on_before_optimizer_step", StepPhase.HOOKS),
    ],
)
def test_the_phase_of_each_of_lightnings_actions(action: str, phase: StepPhase) -> None:
    assert step_phase(action) is phase
