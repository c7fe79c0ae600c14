"""Phases as they change, and the steps they make, from the names that Lightning gives its profiler."""

import itertools
import time
from collections.abc import Callable

import pytest

from lightning_ncclsafe.collectives import recording as module
from lightning_ncclsafe.collectives.recording import PhaseHistory
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.timing.summary import STEP_PHASES, StepPhase, step_phase

MS = 1_000_000
NEXT = "[_TrainingEpochLoop].train_dataloader_next"
BACKWARD = "[Strategy]SafeDDP.backward"


def phases(phase_history: PhaseHistory) -> list[StepPhase]:
    """Those that have ended, and the one that goes on."""
    return [STEP_PHASES[phase] for _, phase in [*phase_history.marks, phase_history.current]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Each look at the clock is a millisecond later than the last, or as much as the test says."""
    ticks = itertools.count()
    monkeypatch.setattr(module, "time_ns", lambda: next(ticks) * MS)

    def every_ns(step_ns: int) -> None:
        monkeypatch.setattr(module, "time_ns", lambda: 1000 * MS + next(ticks) * step_ns)

    return every_ns


def test_a_phase_is_recorded_when_it_changes(clock: Callable[[int], None]) -> None:
    phase_history = PhaseHistory()
    for action in (NEXT, "[Strategy]SafeDDP.batch_to_device", "[Strategy]SafeDDP.training_step", BACKWARD, "", ""):
        phase_history(action)
    assert phases(phase_history) == [StepPhase.OTHER, StepPhase.DATA, StepPhase.COMPUTE]
    times = [at_ns for at_ns, _ in [*phase_history.marks, phase_history.current]]
    assert times == sorted({*times})


def test_time_between_hooks_belongs_to_the_first(clock: Callable[[int], None]) -> None:
    phase_history = PhaseHistory()
    for action in (NEXT, "", "run_training_batch", BACKWARD, "", NEXT, ""):
        phase_history(action)
    assert phases(phase_history) == [StepPhase.OTHER, StepPhase.DATA, StepPhase.COMPUTE, StepPhase.DATA]


def test_a_very_short_phase_is_merged_into_the_previous_one(clock: Callable[[int], None]) -> None:
    phase_history = PhaseHistory()
    phase_history(NEXT)
    phase_history(BACKWARD)
    clock(10_000)
    for action in ("[LightningModule]Net.on_train_batch_end", NEXT, "save_checkpoint"):
        phase_history(action)
    clock(MS)
    phase_history(BACKWARD)
    assert phases(phase_history) == [
        StepPhase.OTHER,
        StepPhase.DATA,
        StepPhase.COMPUTE,
        StepPhase.CHECKPOINT,
        StepPhase.COMPUTE,
    ]


def test_times_are_wall_clock_times() -> None:
    began_ns, phase_history = time.time_ns(), PhaseHistory()
    phase_history(NEXT)
    assert began_ns <= phase_history.current[0] <= time.time_ns()
    assert began_ns <= phase_history.starts[0] <= time.time_ns()


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
def test_a_step_starts_when_a_batch_is_fetched(action: str) -> None:
    phase_history = PhaseHistory()
    for _ in range(3):
        phase_history(action), phase_history(""), phase_history(BACKWARD), phase_history("")
    assert len(phase_history.starts) == 3


def test_it_listens_to_a_tracker(clock: Callable[[int], None]) -> None:
    tracker, phase_history = ActionTracker(), PhaseHistory()
    tracker.listeners += (phase_history,)
    for _ in range(3):
        with tracker.action("run_training_epoch"):
            with tracker.action(NEXT):
                pass
            with tracker.action(BACKWARD):
                pass
    assert len(phase_history.starts) == 3
    assert phases(phase_history) == [StepPhase.OTHER, *[StepPhase.DATA, StepPhase.COMPUTE] * 3]


def test_an_action_inside_a_fetch_starts_no_step() -> None:
    tracker, phase_history = ActionTracker(), PhaseHistory()
    tracker.listeners += (phase_history,)
    for _ in range(3):
        with tracker.action(NEXT), tracker.action("[Callback]Mine.on_fetch"):
            pass
    assert len(phase_history.starts) == 3


def test_a_fetch_after_another_action_starts_a_step() -> None:
    phase_history, inner = PhaseHistory(), "[Callback]Mine.on_fetch"
    for action in (NEXT, inner, NEXT, inner, NEXT):
        phase_history(action)
    assert len(phase_history.starts) == 1, "within"
    for action in ("", NEXT, inner, "", NEXT, "run_training_batch", NEXT):
        phase_history(action)
    assert len(phase_history.starts) == 4


def test_a_phase_of_50_microseconds_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]
    monkeypatch.setattr(module, "time_ns", lambda: now_ns[0])
    phase_history = PhaseHistory()
    for at_ns, action in ((50_000, NEXT), (99_999, BACKWARD), (149_999, NEXT)):
        now_ns[0] = at_ns
        phase_history(action)
    assert [STEP_PHASES[phase] for _, phase in phase_history.marks] == [StepPhase.OTHER, StepPhase.COMPUTE]
    assert phase_history.current == (149_999, STEP_PHASES.index(StepPhase.DATA)), "the phase continues"


def test_memory_is_bounded_without_a_reader(clock: Callable[[int], None]) -> None:
    phase_history = PhaseHistory()
    for _ in range(70_000):
        phase_history(NEXT), phase_history(BACKWARD), phase_history("")
    assert len(phase_history.marks) == len(phase_history.starts) == 1 << 16
    assert len(phase_history._meanings) == 3


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
def test_each_lightning_action_has_its_phase(action: str, phase: StepPhase) -> None:
    assert step_phase(action) is phase
