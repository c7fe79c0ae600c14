"""What is saved at any moment of training, and resumed by Lightning, ends as a run that went on."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from trained import FEATURES, Remembers, Stateful, Trained

from lightning_ncclsafe._torch import tensors
from lightning_ncclsafe.checkpoints.boundary import NO_STEP, NotProvenError
from lightning_ncclsafe.checkpoints.contents import contents
from lightning_ncclsafe.checkpoints.ledger import StepLedger

BATCHES, EPOCHS = 6, 2


class Stop(BaseException):
    """Ends a fit where it is."""


class Listens(pl.Callback):
    """Makes the ledger of a Trainer, as a strategy does."""

    def __init__(self, **device: Any) -> None:
        self.device = device
        self.ledger: Any = None

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        self.on_fit_begins(trainer)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.on_fit_begins(trainer)

    def on_fit_begins(self, trainer: Any) -> None:
        if self.ledger is None:
            self.ledger = StepLedger(trainer, **self.device)
            self.ledger.attach()
            step = trainer.strategy.optimizer_step

            def stepped(*args: Any, **keys: Any) -> Any:
                self.ledger.step_begins()
                result = step(*args, **keys)
                self.ledger.step_ended()
                return result

            trainer.strategy.optimizer_step = stepped


def fit(
    at: Callable[[str, Any, Any], None] = lambda hook, trainer, ledger: None,
    *,
    manual: bool = False,
    ckpt_path: Any = None,
    accumulate: int = 1,
    device: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Trains, and returns all that there is in the end."""
    listens, remembers = Listens(**device or {}), Remembers()
    model = Trained(at=lambda hook: at(hook, trainer, listens.ledger), manual=manual)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        callbacks=[listens, remembers],
        **settings,
    )
    trainer.fit(model, Stateful(BATCHES), Stateful(2), ckpt_path=ckpt_path)
    return {
        "weights": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "ended": remembers.ended,
        "validated": remembers.validated,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def saved_at(number: int, path: Path, **settings: Any) -> tuple[str, int]:
    """Stops at the n-th place, having saved there; where that was, and the step, or why it was not."""
    passed, outcome = [], ["", -1]

    def stop(hook: str, trainer: Any, ledger: StepLedger) -> None:
        passed.append(hook)
        if len(passed) - 1 != number:
            return
        outcome[0] = hook
        try:
            boundary = ledger.newest()
        except NotProvenError as error:
            outcome[0] = f"{hook}: {error}"
        else:
            made = contents(trainer, ledger, boundary, trainer.lightning_module.state_dict)
            torch.save(made, path)
            ledger.check(boundary)
            outcome[1] = boundary.step
        raise Stop

    with pytest.raises(Stop):
        fit(stop, **settings)
    return str(outcome[0]), int(outcome[1])


def places(**settings: Any) -> list[int]:
    """For each hook, the number of one of its calls, in the second half of training."""
    passed: list[str] = []
    fit(lambda hook, trainer, ledger: passed.append(hook), **settings)
    calls = {hook: [number for number, name in enumerate(passed) if name == hook] for hook in passed}
    return sorted(numbers[len(numbers) * 2 // 3] for numbers in calls.values())


@pytest.mark.parametrize(
    "settings",
    [{"accumulate": 2}, {"val_check_interval": 2, "accumulate": 4}, {"limit_val_batches": 0}, {"manual": True}],
    ids=["accumulation", "validation within windows", "no validation", "manual"],
)
def test_a_saved_and_resumed_run_matches_an_undisturbed_one(settings: dict[str, Any], tmp_path: Path) -> None:
    undisturbed = fit(**settings)
    resumed = 0
    for number in places(**settings):
        path = tmp_path / f"{number}.ckpt"
        hook, step = saved_at(number, path, **settings)
        if step < 0:
            # Between the step that a hook makes by hand and the end of its batch there is no boundary.
            assert hook.startswith("after manual step: the main thread was in an optimizer step")
            continue
        outcome = fit(ckpt_path=path, **settings)
        different = [name for name in undisturbed if not same(undisturbed[name], outcome[name])]
        assert different == [], f"saved in {hook}, place {number}, step {step}"
        resumed += 1
    assert resumed >= 9


def newest_at(hook: str, batch: int, look: Callable[[Any, StepLedger], Any], **settings: Any) -> Any:
    """What is seen in a hook's call of that number."""
    calls, seen = [0], []

    def at(name: str, trainer: Any, ledger: StepLedger) -> None:
        if name == hook:
            calls[0] += 1
            if calls[0] - 1 == batch:
                seen.append(look(trainer, ledger))
                raise Stop

    with pytest.raises(Stop):
        fit(at, limit_val_batches=0, **settings)
    return seen[0]


def why(trainer: Any, ledger: StepLedger) -> str:
    with pytest.raises(NotProvenError) as caught:
        ledger.newest()
    return str(caught.value)


def test_no_boundary_exists_before_the_first_step() -> None:
    assert newest_at("on_after_backward", 0, why) == NO_STEP


def test_steps_of_a_raw_optimizer_are_reported_as_uncounted() -> None:
    """``self.optimizers(use_pl_optimizer=False)``, for instance."""

    def step(trainer: Any, ledger: StepLedger) -> str:
        assert why(trainer, ledger) == NO_STEP
        torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.1).step()
        return why(trainer, ledger)

    said = "weights were changed, but by no step of self.optimizers(), which alone are counted"
    # Accumulating, Lightning makes no step of its own either.
    assert newest_at("on_after_backward", 1, step, accumulate=4) == said


def test_weights_changed_outside_a_step_are_not_saved() -> None:
    def change(trainer: Any, ledger: StepLedger) -> str:
        with torch.no_grad():
            trainer.lightning_module.layers[0].weight.mul_(0.5)
        return why(trainer, ledger)

    assert newest_at("training_step", 3, change) == (
        "'layers.0.weight' changed after the last optimizer step, outside of a step"
    )


def test_replaced_weights_are_not_saved() -> None:
    """As a teacher's weights that follow a student's, or weights of lower precision that DDP may compute with."""

    def change(trainer: Any, ledger: StepLedger) -> str:
        weight = trainer.lightning_module.layers[2].weight
        weight.data = weight.data * 0.5
        return why(trainer, ledger)

    assert newest_at("after forward", 3, change) == (
        "'layers.2.weight' changed after the last optimizer step, outside of a step"
    )


def test_weights_averaged_for_validation_are_not_saved() -> None:
    """As Lightning's WeightAveraging does, which writes through ``.data``."""
    seen = []

    def swap(hook: str, trainer: Any, ledger: StepLedger) -> None:
        if hook == "validation_step":
            assert ledger.newest().validates
            trainer.lightning_module.layers[0].weight.data.copy_(torch.full((5, FEATURES), 9.0))
            seen.append(why(trainer, ledger))
            raise Stop

    with pytest.raises(Stop):
        fit(swap)
    assert seen == ["'layers.0.weight' changed after the last optimizer step, outside of a step"]


def test_nothing_is_saved_within_a_step() -> None:
    seen = []

    class Watches(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            if trainer.global_step == 2:
                seen.append(why(trainer, listens.ledger))
            return super().step(lambda: loss)

    listens = Listens()
    model = Trained()
    model.configure_optimizers = lambda: Watches(model.parameters(), lr=0.1)  # type: ignore[method-assign]
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[listens],
    )
    trainer.fit(model, Stateful(BATCHES), Stateful(2))
    assert seen == ["the main thread was in an optimizer step, or right after one"]


class Event:
    """Stands for one of CUDA, on a device that has not come so far yet."""

    is_passed = False

    def query(self) -> bool:
        return self.is_passed


def pass_up_to(ledger: StepLedger, step: int, *, next_begins: bool = False) -> None:
    """The device has made that step."""
    for boundary in ledger._boundaries:
        if boundary.step <= step:
            boundary.done.is_passed = True  # type: ignore[union-attr]
        begins: Any = boundary.next_begins
        if begins is not None and (boundary.step < step or next_begins):
            begins.is_passed = boundary.step <= step


@pytest.mark.parametrize("step", [1, 3, 5])
def test_the_boundary_is_the_one_the_device_has_reached(step: int) -> None:
    """The host has made five steps."""

    def look(trainer: Any, ledger: StepLedger) -> int:
        pass_up_to(ledger, step)
        assert trainer.global_step == 5
        boundary = ledger.newest()
        assert ledger.counters.loop_state(boundary)["epoch_loop.batch_progress"]["total"]["completed"] == step
        return boundary.step

    assert newest_at("on_after_backward", 5, look, device={"make_event": Event}) == step


def test_a_tensor_learning_rate_is_that_of_the_boundary() -> None:
    """A compiled step needs a tensor; schedulers change it in place, and the host is ahead of the device."""
    rate = torch.tensor(0.5)

    def look(trainer: Any, ledger: StepLedger) -> Any:
        pass_up_to(ledger, 3)
        rate.fill_(0.25)
        boundary = ledger.newest()
        return contents(trainer, ledger, boundary, dict)["optimizer_states"][0]["param_groups"][0]["lr"]

    def configure(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trained, "configure_optimizers", configure)
        found = newest_at("on_after_backward", 5, look, device={"make_event": Event})
    assert float(found) == 0.5


def test_a_device_in_the_middle_of_a_step_has_nothing_to_save() -> None:
    def look(trainer: Any, ledger: StepLedger) -> str:
        pass_up_to(ledger, 3, next_begins=True)
        return why(trainer, ledger)

    found = newest_at("training_step", 5, look, device={"make_event": Event})
    assert found == "the device was in an optimizer step"


def test_steps_after_an_aborted_collective_are_not_saved() -> None:
    def look(trainer: Any, ledger: StepLedger) -> str:
        pass_up_to(ledger, 5)
        return why(trainer, ledger)

    device = {"make_event": Event, "was_aborted": lambda: True}
    assert newest_at("training_step", 5, look, device=device).startswith("a collective was aborted")


def test_boundaries_passed_by_the_device_are_forgotten() -> None:
    def look(trainer: Any, ledger: StepLedger) -> int:
        return len(ledger._boundaries)

    passes = {"make_event": lambda: SimpleNamespace(query=lambda: True)}
    assert newest_at("training_step", 5, look, device=passes) == 1


def test_a_failing_ledger_does_not_affect_training(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise AttributeError("a state that cannot be had any more")

    undisturbed = fit(limit_val_batches=0)
    calls = [0]

    def at(name: str, trainer: Any, ledger: StepLedger) -> None:
        if name == "training_step":
            calls[0] += 1
            if calls[0] == 3:
                (remembers,) = (each for each in trainer.callbacks if isinstance(each, Remembers))
                remembers.state_dict = fail
            if calls[0] == 5:
                assert why(trainer, ledger).startswith("the bookkeeping failed: AttributeError")

    assert same(fit(at, limit_val_batches=0), undisturbed)
    assert capsys.readouterr().err.count("the bookkeeping of JustInTimeCheckpoint failed and is off") == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([1.5, -7.0, 3.0]), 7.0),
        (torch.tensor([1.5, float("nan")]), float("nan")),
        (torch.tensor([-7.0, 3.0], dtype=torch.bfloat16), 7.0),
        (torch.tensor([-7, 3]), 7),
        (torch.tensor([7, 3], dtype=torch.uint16), 7),
        (torch.tensor([-4j, 3]), 4.0),
        (torch.tensor([False, True]), 1),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), 0x40),
        (torch.empty(0), 0.0),
        (torch.arange(6.0).reshape(2, 3).T, 5.0),
    ],
    ids=str,
)
def test_the_largest_value_of_any_type(values: torch.Tensor, expected: float) -> None:
    (found,) = tensors.largest([values])
    assert float(found) == pytest.approx(expected, nan_ok=True)
