"""Where a Trainer stands, read from frames."""

import pytest

from lightning_ncclsafe.facts import Phase
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.trainer_frames import progress_in

SITE = "/venv/lib/python3.12/site-packages"
PL = f"{SITE}/lightning/pytorch"
OLD = f"{SITE}/pytorch_lightning"


def frame(file: str, function: str, **values: str) -> SeenFrame:
    return SeenFrame(file, 10, function, values)


MAIN = frame("/home/ada/train.py", "<module>")
FIT = [MAIN, frame(f"{PL}/trainer/trainer.py", "fit"), frame(f"{PL}/trainer/trainer.py", "_run")]
ADVANCE = frame(f"{PL}/loops/training_epoch_loop.py", "advance", batch_idx="7", self="<_TrainingEpochLoop at 0x7f>")
TRAINING = [*FIT, frame(f"{PL}/trainer/trainer.py", "_run_stage"), frame(f"{PL}/loops/fit_loop.py", "advance"), ADVANCE]
STEP = [
    frame(f"{PL}/trainer/call.py", "_call_strategy_hook", hook_name="'training_step'"),
    frame(f"{PL}/profilers/profiler.py", "profile"),
    frame(f"{PL}/strategies/strategy.py", "training_step", self="<DDPStrategy at 0x7f>"),
    frame("/home/ada/train.py", "training_step", batch_idx="3"),
]
EVALUATION = frame(f"{PL}/loops/evaluation_loop.py", "run", batch_idx="2")


def test_a_step_has_its_hook_its_strategy_and_its_batch() -> None:
    progress = progress_in([*TRAINING, *STEP], 2.5)
    assert (progress.phase, progress.batch_idx, progress.epoch, progress.idle_s) == (Phase.TRAIN, 7, -1, 2.5)
    assert [action.name for action in progress.actions] == ["[Strategy]DDPStrategy.training_step"]


def test_hooks_of_module_and_callback_have_their_classes() -> None:
    hook = frame(
        f"{PL}/trainer/call.py", "_call_callback_hooks", hook_name="'on_validation_end'", callback="<Mine at 0x1>"
    )
    module = frame(
        f"{PL}/trainer/call.py", "_call_lightning_module_hook", hook_name="'setup'", pl_module="<my.Net at 0x1>"
    )
    assert [one.name for one in progress_in([*TRAINING, hook], 0).actions] == ["[Callback]Mine.on_validation_end"]
    assert [one.name for one in progress_in([*FIT, module], 0).actions] == ["[LightningModule]Net.setup"]


def test_without_locals_the_function_below_is_the_hook() -> None:
    hook = [
        frame(f"{OLD}/trainer/trainer.py", "_call_lightning_module_hook"),
        frame("/home/ada/train.py", "on_fit_start"),
    ]
    assert [one.name for one in progress_in(hook, 0).actions] == ["[LightningModule]LightningModule.on_fit_start"]


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([MAIN], Phase.UNKNOWN),
        (FIT, Phase.INIT),
        (TRAINING, Phase.TRAIN),
        ([*TRAINING, EVALUATION], Phase.VALIDATE),
        ([*FIT, frame(f"{PL}/trainer/trainer.py", "_run_sanity_check"), EVALUATION], Phase.SANITY_CHECK),
        ([MAIN, frame(f"{PL}/trainer/trainer.py", "_test_impl"), EVALUATION], Phase.TEST),
        ([*FIT, frame(f"{PL}/loops/prediction_loop.py", "run")], Phase.PREDICT),
        ([*TRAINING, frame(f"{PL}/trainer/trainer.py", "save_checkpoint")], Phase.CHECKPOINT),
        ([*FIT, frame(f"{PL}/trainer/call.py", "_call_callback_hooks", hook_name="'on_fit_end'")], Phase.TRAIN),
        ([*FIT, frame(f"{PL}/loops/fit_loop.py", "run"), frame(f"{PL}/loops/fit_loop.py", "setup_data")], Phase.INIT),
        ([*TRAINING[:-1], frame(f"{PL}/loops/fit_loop.py", "setup_data")], Phase.TRAIN),
        ([*FIT, frame(f"{PL}/trainer/call.py", "_call_teardown_hook")], Phase.TRAIN),
        ([MAIN, frame(f"{OLD}/loops/epoch/training_epoch_loop.py", "advance")], Phase.TRAIN),
        ([MAIN, frame(f"{OLD}/loops/dataloader/evaluation_loop.py", "advance")], Phase.VALIDATE),
    ],
)
def test_the_innermost_loop_gives_the_phase(stack: list[SeenFrame], phase: Phase) -> None:
    assert progress_in(stack, 0).phase is phase


def test_the_batch_comes_from_the_loop_and_not_from_user_code() -> None:
    assert progress_in([*TRAINING, EVALUATION], 0).batch_idx == 2
    assert progress_in([MAIN, frame("/home/ada/train.py", "train", batch_idx="5")], 0).batch_idx == -1
    assert (
        progress_in([frame(f"{PL}/loops/training_epoch_loop.py", "advance", batch_idx="<int at 0x1>")], 0).batch_idx
        == -1
    )


def test_creating_a_loader_and_saving_are_actions() -> None:
    fetch = frame(f"{PL}/loops/fetchers.py", "__next__")
    assert progress_in([*TRAINING, fetch], 0).actions[-1].name == "[_TrainingEpochLoop].train_dataloader_next"
    save = frame(f"{PL}/trainer/trainer.py", "save_checkpoint")
    assert progress_in([*TRAINING, save], 0).actions[-1].name == "save_checkpoint"
    init = frame(f"{SITE}/torch/distributed/distributed_c10d.py", "init_process_group")
    assert progress_in([*FIT, init], 0).actions[-1].name == "init_process_group"


@pytest.mark.parametrize(
    ("stack", "action"),
    [
        (FIT, "[_EvaluationLoop].val_next"),
        ([MAIN, frame(f"{PL}/trainer/trainer.py", "_test_impl")], "[_EvaluationLoop].test_next"),
    ],
)
def test_the_fetch_of_an_evaluation_has_the_name_that_lightning_gives_it(stack: list[SeenFrame], action: str) -> None:
    loop = frame(f"{PL}/loops/evaluation_loop.py", "run", self="<_EvaluationLoop at 0x1>")
    fetch = frame(f"{PL}/loops/fetchers.py", "__next__")
    assert progress_in([*stack, loop, fetch], 0).actions[-1].name == action


def test_creating_validation_loaders_before_training_is_not_validation() -> None:
    loop, setup = f"{PL}/loops/fit_loop.py", frame(f"{PL}/loops/evaluation_loop.py", "setup_data")
    assert progress_in([*FIT, frame(loop, "run"), frame(loop, "on_run_start"), setup], 0.0).phase is Phase.INIT
    assert progress_in([*FIT, EVALUATION, setup], 0.0).phase is Phase.VALIDATE
