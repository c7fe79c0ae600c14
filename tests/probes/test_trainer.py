"""The probe of the Trainer against real ones, looked at from their own hooks, as another thread may at any time."""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ncclsafe.code.marks import Mark, mark_at
from lightning_ncclsafe.facts import Action, LoaderFacts, LoopEnd, Phase, Progress, StorageFacts, TrainerFacts
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.probes.process import stacks
from lightning_ncclsafe.probes.trainer import state as trainer_probe
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe

BATCHES = 3


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Held(Numbers):
    """What is validated on."""


class Stream(IterableDataset[torch.Tensor]):
    """It has no length."""

    def __iter__(self) -> Any:
        return iter(torch.zeros(2 * BATCHES, 4))


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        return None

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        return None

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Look(Callback):
    """Looks at one of the probe's parts whenever one of these hooks is called."""

    def __init__(self, *hooks: str, part: Callable[[TrainerProbe], Any]) -> None:
        self.seen: dict[str, list[Any]] = {hook: [] for hook in hooks}
        self.probe: TrainerProbe | None = None
        for hook in hooks:
            setattr(self, hook, self._looking(hook, part))

    def _looking(self, hook: str, part: Callable[[TrainerProbe], Any]) -> Callable[..., None]:
        def look(*_: Any, **__: Any) -> None:
            assert self.probe is not None
            self.seen[hook].append(part(self.probe))

        return look


def progress(probe: TrainerProbe) -> Progress:
    return probe.progress((), "", 0.0)


def phase(probe: TrainerProbe) -> Phase:
    return progress(probe).phase


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "num_sanity_val_steps": 0, "logger": False, "enable_checkpointing": False, **options},
    )


def loader(dataset: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    return DataLoader(dataset, batch_size=2)


def run(folder: Path, look: Look, call: str = "fit", *loaders: Any, **options: Any) -> TrainerProbe:
    trainer = make_trainer(folder, look, **options)
    look.probe = probe = TrainerProbe(trainer)
    probe.started = True
    getattr(trainer, call)(Net(), *(loaders or LOADERS[call]))
    return probe


LOADERS = {
    "fit": (loader(Numbers()), loader(Held())),
    "validate": (loader(Held()),),
    "test": (loader(Held()),),
    "predict": (loader(Held()),),
}


HOOKS = ("on_sanity_check_start", "on_train_batch_start", "on_validation_batch_start", "on_train_epoch_end")


def test_the_loop_gives_the_phase(tmp_path: Path) -> None:
    look = Look(*HOOKS, part=phase)
    run(tmp_path, look, max_epochs=1, num_sanity_val_steps=1)
    assert set(look.seen["on_sanity_check_start"]) == {Phase.SANITY_CHECK}
    assert set(look.seen["on_train_batch_start"]) == {Phase.TRAIN}
    assert look.seen["on_validation_batch_start"] == [Phase.SANITY_CHECK, *[Phase.VALIDATE] * BATCHES]
    assert look.seen["on_train_epoch_end"] == [Phase.TRAIN]


@pytest.mark.parametrize(
    ("call", "hook", "expected"),
    [
        ("validate", "on_validation_batch_start", Phase.VALIDATE),
        ("test", "on_test_batch_start", Phase.TEST),
        ("predict", "on_predict_batch_start", Phase.PREDICT),
    ],
)
def test_each_call_has_its_phase_and_counts_its_batches(tmp_path: Path, call: str, hook: str, expected: Phase) -> None:
    look = Look(hook, part=progress)
    run(tmp_path, look, call)
    assert [(seen.phase, seen.batch_idx) for seen in look.seen[hook]] == [(expected, n) for n in range(BATCHES)]


def test_the_phase_is_init_until_all_ranks_have_met(tmp_path: Path) -> None:
    look = Look("setup", "on_train_batch_start", part=phase)
    trainer = make_trainer(tmp_path, look)
    look.probe = TrainerProbe(trainer)
    trainer.fit(Net(), *LOADERS["fit"])
    assert {seen for hook in look.seen.values() for seen in hook} == {Phase.INIT}


def test_the_phase_is_checkpoint_during_a_save(tmp_path: Path) -> None:
    tracker = ActionTracker()
    look = Look(
        "on_save_checkpoint",
        "on_train_batch_start",
        part=lambda probe: probe.progress(tracker.actions(), "", 0.0).phase,
    )
    trainer = make_trainer(tmp_path, look, max_epochs=1, enable_checkpointing=True)
    tracker.attach(trainer.profiler)
    look.probe = TrainerProbe(trainer)
    look.probe.started = True
    trainer.fit(Net(), *LOADERS["fit"])
    assert look.seen == {"on_save_checkpoint": [Phase.CHECKPOINT], "on_train_batch_start": [Phase.TRAIN] * BATCHES}


def limit_name(probe: TrainerProbe) -> str:
    name = probe.limit_name(is_saving=False)
    assert name == probe.phase_kind(()).limit_name
    return name


def test_the_first_batch_phase_includes_its_start_and_end_hooks(tmp_path: Path) -> None:
    hooks = ("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
    look = Look(*hooks, "on_train_start", "on_train_end", "on_validation_batch_start", part=limit_name)
    run(tmp_path, look)
    batches = ["first_batch", *["train"] * (BATCHES - 1)]
    assert look.seen == {
        "on_train_start": ["first_batch"],
        "on_train_epoch_start": ["first_batch"] * 2,
        "on_train_batch_start": batches * 2,
        "on_train_batch_end": ["train"] * BATCHES * 2,
        "on_train_epoch_end": ["train"] * 2,
        "on_train_end": ["train"],
        "on_validation_batch_start": ["validate"] * BATCHES * 2,
    }


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_after_a_mid_epoch_resume_the_next_batch_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "middle.ckpt"

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(path)

    make_trainer(tmp_path, Save(), max_epochs=1).fit(Net(), *LOADERS["fit"])
    look = Look("on_train_batch_start", part=limit_name)
    trainer = make_trainer(tmp_path, look, max_epochs=1)
    look.probe = TrainerProbe(trainer)
    # As the strategy does it, when everything has been restored.
    monkeypatch.setattr(
        trainer.strategy,
        "barrier",
        lambda name=None: setattr(look.probe, "started", look.probe.started or name == "run-stage"),
    )
    trainer.fit(Net(), *LOADERS["fit"], ckpt_path=path)
    assert look.seen["on_train_batch_start"] == ["first_batch", *["train"] * (BATCHES - 2)]


def test_epoch_hooks_are_not_batch_hooks(tmp_path: Path) -> None:
    tracker = ActionTracker()
    hooks = ("on_train_epoch_start", "on_train_batch_start", "on_validation_batch_end", "on_validation_epoch_end")
    look = Look(*hooks, "on_train_epoch_end", part=lambda probe: probe.phase_kind(tracker.actions()))
    trainer = make_trainer(tmp_path, look, max_epochs=1)
    tracker.attach(trainer.profiler)
    look.probe = TrainerProbe(trainer)
    look.probe.started = True
    trainer.fit(Net(), *LOADERS["fit"])
    seen = {hook: (moments[-1].phase, moments[-1].per_batch) for hook, moments in look.seen.items()}
    assert seen == {
        "on_train_epoch_start": (Phase.TRAIN, False),
        "on_train_batch_start": (Phase.TRAIN, True),
        "on_validation_batch_end": (Phase.VALIDATE, True),
        "on_validation_epoch_end": (Phase.VALIDATE, False),
        "on_train_epoch_end": (Phase.TRAIN, False),
    }
    assert [phase_kind.first for phase_kind in look.seen["on_validation_batch_end"]] == [False] * BATCHES


def test_finished_overrides_any_phase(tmp_path: Path) -> None:
    probe = TrainerProbe(make_trainer(tmp_path))
    probe.finished = True
    assert probe.progress((Action(name="save_checkpoint", for_s=1.0),), "", 0.0).phase is Phase.FINISHED


def test_epoch_batch_and_step_are_counted(tmp_path: Path) -> None:
    look = Look("on_train_batch_start", part=progress)
    run(tmp_path, look)
    seen = [(p.epoch, p.batch_idx, p.global_step, p.is_last_batch) for p in look.seen["on_train_batch_start"]]
    assert seen == [
        (epoch, batch, epoch * BATCHES + batch, batch == BATCHES - 1) for epoch in range(2) for batch in range(BATCHES)
    ]


def test_the_batch_index_is_unset_before_the_first_batch_and_kept_after_the_last(tmp_path: Path) -> None:
    look = Look("on_train_start", "on_train_epoch_end", part=lambda probe: progress(probe).batch_idx)
    run(tmp_path, look, max_epochs=1)
    assert look.seen == {"on_train_start": [-1], "on_train_epoch_end": [BATCHES - 1]}


def test_the_first_hooks_of_an_epoch_have_no_batch(tmp_path: Path) -> None:
    """Lightning still has the counts of the previous epoch then."""

    def place(probe: TrainerProbe) -> tuple[int, int, bool, int, int | None]:
        now, facts = progress(probe), probe.facts()
        assert facts is not None
        return now.epoch, now.batch_idx, now.is_last_batch, facts.batches_begun, facts.batches_before

    look = Look("on_train_epoch_start", "on_train_batch_start", part=place)
    run(tmp_path, look)
    assert look.seen["on_train_epoch_start"] == [(0, -1, False, 0, 0), (1, -1, False, 0, BATCHES)]
    assert look.seen["on_train_batch_start"][1] == (0, 1, False, 2, 0)
    assert look.seen["on_train_batch_start"][BATCHES] == (1, 0, False, 1, BATCHES)


def test_an_epoch_that_is_over_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    """Lightning counts it as completed before it makes new loaders, and before the hooks at the end."""
    hooks = ("on_train_start", "on_train_epoch_start", "on_validation_start", "on_train_epoch_end", "on_train_end")
    look = Look(*hooks, part=lambda probe: (progress(probe).epoch, progress(probe).is_between_epochs))
    probe = run(tmp_path, look)
    for hook in hooks[1:4]:
        assert look.seen[hook] == [(0, False), (1, False)]
    assert (look.seen["on_train_start"], look.seen["on_train_end"]) == ([(0, False)], [(2, True)])
    probe.finished = True
    assert progress(probe).is_between_epochs
    evaluated = Look("on_test_start", part=lambda probe: progress(probe).is_between_epochs)
    run(tmp_path, evaluated, "test")
    assert evaluated.seen["on_test_start"] == [False]


def test_validation_within_an_epoch_counts_its_own_batches(tmp_path: Path) -> None:
    look = Look("on_validation_batch_start", part=progress)
    run(tmp_path, look, max_epochs=1)
    assert [seen.batch_idx for seen in look.seen["on_validation_batch_start"]] == list(range(BATCHES))


def test_tracker_facts_are_forwarded(tmp_path: Path) -> None:
    actions = (Action(name="run", for_s=2.0),)
    seen = TrainerProbe(make_trainer(tmp_path)).progress(actions, "setup", 1.23456)
    assert (seen.actions, seen.last_action, seen.idle_s) == (actions, "setup", 1.235)


def loaders(probe: TrainerProbe) -> tuple[LoaderFacts, ...]:
    return probe.loaders()


def test_the_loaders_are_those_of_the_current_loop(tmp_path: Path) -> None:
    look = Look("on_train_batch_start", "on_validation_batch_start", part=loaders)
    run(
        tmp_path,
        look,
        "fit",
        loader(Numbers()),
        [loader(Held()), DataLoader(Numbers(), batch_size=1)],
        max_epochs=1,
    )
    numbers = (LoaderFacts(dataset="Numbers", batches=BATCHES),)
    held = (LoaderFacts(dataset="Held", batches=BATCHES), LoaderFacts(dataset="Numbers", batches=2 * BATCHES))
    assert look.seen["on_train_batch_start"] == [numbers] * BATCHES
    assert look.seen["on_validation_batch_start"] == [held] * (3 * BATCHES)


def test_a_loader_without_length_has_no_number_of_batches(tmp_path: Path) -> None:
    look = Look("on_train_batch_start", part=loaders)
    run(tmp_path, look, "fit", loader(Stream()), loader(Held()), max_epochs=1)
    assert look.seen["on_train_batch_start"] == [(LoaderFacts(dataset="Stream", batches=None),)] * BATCHES


def test_the_workers_of_a_loader_are_counted_without_starting_them() -> None:
    facts = trainer_probe._loader_facts(DataLoader(Numbers(), num_workers=1, prefetch_factor=5), 9.0)
    assert facts == LoaderFacts(dataset="Numbers", num_workers=1, prefetch_factor=5, batches=9)
    assert trainer_probe._loader_facts([1, 2], float("inf")) == LoaderFacts(dataset="list", batches=None)


def test_storage_lists_logger_and_checkpoint_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_probe, "filesystem_of", lambda path: "nfs4" if "logs" in path else "ext4")
    trainer = make_trainer(
        tmp_path,
        ModelCheckpoint(dirpath=tmp_path / "kept"),
        logger=[TensorBoardLogger(tmp_path / "logs"), CSVLogger(tmp_path / "logs-csv")],
        enable_checkpointing=True,
    )
    assert TrainerProbe(trainer).storage() == (
        StorageFacts(owner="TensorBoardLogger", path=str(tmp_path / "logs"), filesystem="nfs4"),
        StorageFacts(owner="CSVLogger", path=str(tmp_path / "logs-csv"), filesystem="nfs4"),
        StorageFacts(owner="ModelCheckpoint", path=str(tmp_path / "kept"), filesystem="ext4"),
    )
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_a_folder_yet_is_left_out(tmp_path: Path) -> None:
    look = Look("on_train_batch_start", part=lambda probe: [facts.owner for facts in probe.storage()])
    probe = run(tmp_path, look, max_epochs=1, enable_checkpointing=True)
    assert look.seen["on_train_batch_start"][0] == ["ModelCheckpoint"]
    assert TrainerProbe(make_trainer(tmp_path, enable_checkpointing=True)).storage() == ()
    assert probe.storage()[0].path.startswith(str(tmp_path))


@pytest.mark.parametrize("trainer", [None, object()])
def test_an_incomplete_trainer_is_read_without_an_error(trainer: Any) -> None:
    probe = TrainerProbe(trainer)
    assert progress(probe) == Progress(phase=Phase.INIT)
    assert (probe.loaders(), probe.storage()) == ((), ())
    probe.started = True
    assert (probe.phase_kind(()), probe.batch_idx()) == (PhaseKind(phase=Phase.INIT), -1)


@pytest.mark.parametrize("started", [False, True])
def test_reading_before_fit_is_not_an_error(tmp_path: Path, started: bool) -> None:
    probe = TrainerProbe(make_trainer(tmp_path, logger=CSVLogger(tmp_path)))
    probe.started = started
    assert progress(probe) == Progress(phase=Phase.INIT)
    assert probe.loaders() == ()
    assert [facts.owner for facts in probe.storage()] == ["CSVLogger"]


def test_reading_after_fit_is_not_an_error(tmp_path: Path) -> None:
    probe = run(tmp_path, Look(part=phase))
    assert progress(probe).global_step == 2 * BATCHES
    probe.loaders()
    probe.storage()


class Short:
    """A sampler of batches that gives fewer than its length says."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        return iter([[0, 1]] * (BATCHES - 1))


class Ending(Net):
    """Ends its epoch in its second batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
        if self.how == "minus one" and batch_idx == 1:
            return -1  # minus one
        return None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.how == "stop" and batch_idx == 1:
            self.trainer.should_stop |= True  # stop
        if self.how in ("told later", "told by name") and batch_idx == 1:
            self.tell()
        if self.how == "next" and batch_idx == 1:
            next(iter(()))  # next
        return super().training_step(batch, batch_idx)

    def on_fit_start(self) -> None:
        def tell() -> None:
            if self.how == "told later":
                self.trainer.should_stop = True  # handler
            else:
                self.trainer.should_stop = True  # by name

        self.tell = tell


class Last(Net):
    """Makes the present epoch its last one."""

    def on_train_epoch_end(self) -> None:
        make_last(self.trainer)


def make_last(trainer: L.Trainer) -> None:
    trainer.fit_loop.max_epochs = trainer.current_epoch + 1  # last epoch


class Recounting(Net):
    """Goes on with the number of an epoch that it has from elsewhere."""

    def on_train_start(self) -> None:
        self.trainer.fit_loop.epoch_progress.current.processed = 4  # recounts


def lines_of(*marks: str) -> list[int]:
    lines = Path(__file__).read_text().splitlines()
    return [next(n for n, line in enumerate(lines, start=1) if line.endswith(f"  # {mark}")) for mark in marks]


@pytest.mark.parametrize(
    ("how", "options", "end", "begun", "marks"),
    [
        ("", {}, LoopEnd.DATA, BATCHES, ()),
        ("stop", {}, LoopEnd.SHOULD_STOP, 2, ("stop", "handler", "by name")),
        ("told later", {}, LoopEnd.SHOULD_STOP, 2, ("stop", "handler", "by name")),
        ("told by name", {}, LoopEnd.SHOULD_STOP, 2, ("stop", "handler", "by name")),
        ("next", {}, LoopEnd.UNKNOWN, 2, ("minus one", "next")),
        ("minus one", {}, LoopEnd.UNKNOWN, 2, ("minus one", "next")),
        ("", {"max_steps": 2}, LoopEnd.MAX_STEPS, 2, ()),
        ("", {"limit_train_batches": 2}, LoopEnd.DATA, 2, ()),
        ("short", {}, LoopEnd.DATA, 2, ()),
    ],
)
def test_the_reason_the_loop_ended_is_kept_after_the_trainer(
    how: str, options: dict[str, Any], end: LoopEnd, begun: int, marks: tuple[str, ...], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, **{"max_epochs": 1, **options})
    probe = TrainerProbe(trainer)
    probe.started = True
    train, held = LOADERS["fit"]
    short: Any = Short()
    trainer.fit(Ending(how), DataLoader(Numbers(), batch_sampler=short) if how == "short" else train, held)
    probe.finished = True
    facts = probe.facts()
    assert facts is not None
    assert (facts.end, facts.batches_begun) == (end, begun)
    assert begun < BATCHES or facts.validated == len(held)
    assert facts.batches == options.get("limit_train_batches", BATCHES)
    places = [f"{__file__}:{line} in " for line in lines_of(*marks)]
    assert not facts.changed
    assert sorted(place.rpartition(" ")[0] + " " for place in probe.ended_at(facts)) == sorted(places)


class Stopping(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = True  # stopped by each


class StoppingToo(Stopping):
    """Of another class, which inherits the same line."""


def test_a_line_that_callbacks_inherit_is_named_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Stopping(), StoppingToo(), max_epochs=1)
    probe = TrainerProbe(trainer)
    probe.started = True
    trainer.fit(Net(), *LOADERS["fit"])
    told = probe.facts()
    assert probe.ended_at(told) == (f"{__file__}:{lines_of('stopped by each')[0]} in on_train_batch_end",)


def test_no_lines_are_given_for_another_end_than_was_told(tmp_path: Path) -> None:
    """The source is searched last: the rank may have continued meanwhile."""
    trainer = make_trainer(tmp_path, Stopping(), max_epochs=1)
    probe = TrainerProbe(trainer)
    probe.started = True
    trainer.fit(Net(), *LOADERS["fit"])
    told = probe.facts()
    assert told is not None and told.end is LoopEnd.SHOULD_STOP
    trainer.should_stop = False
    assert probe.ended_at(told) == ()
    assert probe.ended_at(None) == ()


class Validating(Net):
    """Has each epoch validate after a batch of its own choice."""

    def __init__(self, probe: TrainerProbe) -> None:
        super().__init__()
        self.probe = probe
        self.seen: list[tuple[TrainerFacts | None, tuple[str, ...], tuple[str, ...]]] = []

    def on_train_start(self) -> None:
        self.trainer.val_check_batch = 2  # validates

    def on_validation_end(self) -> None:
        told = self.probe.facts()
        self.seen.append((told, self.probe.ended_at(told), self.probe.validates_at()))


def test_a_validation_in_mid_epoch_does_not_end_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0)
    probe = TrainerProbe(trainer)
    probe.started = True
    module = Validating(probe)
    trainer.fit(module, *LOADERS["fit"])
    (within, ended_at, validates_at), *_ = module.seen
    assert within is not None and within.batches_begun == 2 < BATCHES
    assert within.end is LoopEnd.UNKNOWN
    assert ended_at == (f"{__file__}:{lines_of('validates')[0]} in on_train_start",) == validates_at


def test_a_changed_max_epochs_is_found(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=6)
    probe = TrainerProbe(trainer)
    probe.started = True
    trainer.fit(Last(), *LOADERS["fit"])
    facts = probe.facts()
    assert facts is not None and trainer.current_epoch == 1
    assert (facts.changed, facts.settings["max_epochs"]) == ({"max_epochs": "1"}, "6")
    assert probe.ended_at(facts) == (f"{__file__}:{lines_of('last epoch')[0]} in make_last",)


def test_a_manually_set_epoch_count_is_a_change(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=6)
    probe = TrainerProbe(trainer)
    probe.started = True
    trainer.fit(Recounting(), *LOADERS["fit"])
    facts = probe.facts()
    assert facts is not None and trainer.current_epoch == 6
    assert (facts.changed, facts.settings["first epoch"]) == ({"first epoch": "4"}, "0")
    assert probe.ended_at(facts) == (f"{__file__}:{lines_of('recounts')[0]} in on_train_start",)


def test_no_setting_has_changed_in_epoch_end_hooks(tmp_path: Path) -> None:
    class Look(Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            facts = probe.facts()
            seen.append(None if facts is None else facts.changed)

    seen: list[dict[str, str] | None] = []
    trainer = make_trainer(tmp_path, Look(), max_epochs=2)
    probe = TrainerProbe(trainer)
    probe.started = True
    trainer.fit(Net(), *LOADERS["fit"])
    assert seen == [{}, {}]


def test_compared_settings_are_those_at_the_start_of_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, accumulate_grad_batches=3, precision="bf16-mixed", limit_train_batches=0.5)
    probe = TrainerProbe(trainer)
    assert probe.facts() is None  # nothing has been asked of the Trainer yet
    probe.started = True
    trainer.accumulate_grad_batches = 4
    trainer.fit(Net(), *LOADERS["fit"])
    facts = probe.facts()
    assert facts is not None and not facts.validates_by_clock
    asked = {name: facts.settings[name] for name in ("accumulate_grad_batches", "precision", "limit_train_batches")}
    assert asked == {"accumulate_grad_batches": "3", "precision": "bf16-mixed", "limit_train_batches": "0.5"}
    assert (facts.settings["first epoch"], facts.settings["first step"]) == ("0", "0")
    assert "gradient_clip_val" not in facts.settings
    trainer.validate(Net(), loader(Held()), verbose=False)
    assert probe.facts() is None


def settings(probe: TrainerProbe) -> dict[str, str] | None:
    facts = probe.facts()
    return None if facts is None else facts.settings


def test_before_training_only_the_checkpoint_is_known(tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    first = make_trainer(tmp_path, max_epochs=1)
    first.fit(Net(), *LOADERS["fit"])
    first.save_checkpoint(path)
    for resumed, known in ((path, {"ckpt_path": path}), (None, {})):
        look = Look("on_fit_start", part=settings)
        trainer = make_trainer(tmp_path, look)
        look.probe = TrainerProbe(trainer)
        trainer.fit(Net(), *LOADERS["fit"], ckpt_path=resumed)
        assert look.seen["on_fit_start"] == [known]
        look.probe.started = True
        later = settings(look.probe)
        assert later is not None and "ckpt_path" not in later and "max_epochs" in later


def test_accumulation_set_by_a_callback_is_compared(tmp_path: Path) -> None:
    """The callback sets the Trainer's value when an epoch starts: the value before the first epoch means nothing."""
    trainer = make_trainer(tmp_path, GradientAccumulationScheduler({4: 8, 0: 2}))
    probe = TrainerProbe(trainer)
    probe.started = True
    trainer.fit(Net(), *LOADERS["fit"])
    facts = probe.facts()
    assert facts is not None
    assert facts.settings["accumulate_grad_batches"] == "2 (from epoch 0), 8 (from epoch 4)"


def test_time_based_validation_is_recognised(tmp_path: Path) -> None:
    try:
        trainer = make_trainer(tmp_path, val_check_interval=timedelta(minutes=90), check_val_every_n_epoch=None)
    except (TypeError, MisconfigurationException):
        pytest.skip("this Lightning does not validate by the clock")
    probe = TrainerProbe(trainer)
    probe.started = True
    trainer.fit(Net(), *LOADERS["fit"])
    facts = probe.facts()
    assert facts is not None and facts.validates_by_clock
    assert facts.settings["val_check_interval"] == "5400 s"


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        for row in range(BATCHES):
            if row % 2:
                continue  # <- endless
            yield torch.full((4,), float(row))


def test_the_lines_that_decide_how_much_data_there_is_are_those_of_each_stage(tmp_path: Path) -> None:
    look = Look("on_validation_batch_start", "on_train_end", part=lambda probe: probe.data_ends_at())
    numbers = Numbers()  # <- numbers
    trainer = make_trainer(tmp_path, look, max_epochs=1)
    look.probe = TrainerProbe(trainer)
    assert look.probe.data_ends_at() == {}
    trainer.fit(Net(), DataLoader(numbers, 2), [DataLoader(Endless())] * 2)
    validate, train = (place_of(mark) for mark in ("endless", "numbers"))
    expected = {
        "train": f"{train} in test_the_lines_that_decide_how_much_data_there_is_are_those_of_each_stage",
        "validate": f"{validate} in __iter__",
    }
    assert {tuple(sorted(seen.items())) for each in look.seen.values() for seen in each} == {
        tuple(sorted(expected.items()))
    }
    trainer.test(Net(), DataLoader(Endless()), verbose=False)
    assert look.probe.data_ends_at() == {"test": f"{validate} in __iter__"}


def test_loaders_that_end_at_different_lines_have_none(tmp_path: Path) -> None:
    look = Look("on_validation_batch_start", part=lambda probe: probe.data_ends_at())
    held = Held()
    trainer = make_trainer(tmp_path, look, max_epochs=1)
    look.probe = TrainerProbe(trainer)
    trainer.fit(Net(), DataLoader(Stream(), 2), [DataLoader(held, 2), DataLoader(Endless())])
    assert all("validate" not in seen for seen in look.seen["on_validation_batch_start"])


class Ledger(CSVLogger):
    @rank_zero_only
    def log_histogram(self, name: str) -> str:
        return mark_here(name)


def mark_here(function: str) -> str:
    """The mark of the frame that calls this."""
    caller = sys._getframe(1)
    assert caller.f_code.co_name == function
    return stacks.seen_frame(*stacks.place_in(caller, caller.f_lineno)).mark


def test_methods_of_the_users_own_loggers_are_marked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.log_histogram("log_histogram") == ""
    TrainerProbe(make_trainer(tmp_path, logger=[CSVLogger(tmp_path), ledger]))
    assert ledger.log_histogram("log_histogram") == Mark.USER_LOGGER
    library = CSVLogger.log_metrics.__wrapped__.__code__
    assert mark_at(library.co_filename, library.co_firstlineno, library.co_name) == ""


class Client:
    """Connects when it is asked for anything."""

    asked: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise AttributeError(name)


class Sharing:
    def log_shared(self, name: str) -> str:
        return mark_here(name)


class Odd(Sharing, CSVLogger):
    client = Client()
    dump = staticmethod(json.dumps)

    @property
    def log_after(self) -> str:
        return mark_here("log_after")


def test_only_what_a_class_of_loggers_itself_has_is_marked(tmp_path: Path) -> None:
    odd = Odd(tmp_path)
    trainer = make_trainer(tmp_path, logger=odd)
    Client.asked.clear()
    TrainerProbe(trainer)
    assert not Client.asked
    assert odd.log_after == Mark.USER_LOGGER
    assert odd.log_shared("log_shared") == ""
    code = json.dumps.__code__
    assert mark_at(code.co_filename, code.co_firstlineno, code.co_name) == ""


def place_of(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {mark}"))
    return f"{__file__}:{number}"
