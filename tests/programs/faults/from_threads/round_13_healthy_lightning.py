"""Round 13 after public threads: what users of Lightning do that looks odd, and of which nothing is to be said."""

import json
import time
from typing import Any

import lightning as L
import torch
from from_threads.round_13_lightning import LIGHTNING
from threads import quiet
from torchmetrics.classification import MulticlassConfusionMatrix
from training import Here, LoggingNet, Net, rows
from truths import Moment


class Confused(Net):
    """The matrix is computed by all ranks, and once more by the first one, which keeps what it has computed."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.matrix = MulticlassConfusionMatrix(num_classes=2)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.matrix.update(self.layers(batch[0]).argmax(1), (batch[0][:, 0] > 0.5).long())

    def on_validation_epoch_end(self) -> None:
        counts = self.matrix.compute()
        self.log("accuracy", counts.diag().sum() / counts.sum())
        if self.trainer.is_global_zero:
            self.draw(self.matrix)
        self.matrix.reset()

    def draw(self, matrix: MulticlassConfusionMatrix) -> None:
        time.sleep(1.0)
        path = self.here.folder / f"matrix-{self.current_epoch}.json"
        path.write_text(json.dumps(matrix.compute().tolist()))


@quiet("https://github.com/microsoft/hi-ml/pull/450", world_size=3, moment=Moment.EPOCH_END)
def matrix_computed_once_more_on_the_first_rank(here: Here) -> None:
    """A metric that has been computed gives the same again without asking anybody, until it is reset."""
    here.fit(net=Confused(here), data=(rows(here), rows(here, batches=2)))


class Halved(LoggingNet):
    """Steps with every other batch; the closure is called with each, and what it gives for the others is dropped."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        time.sleep(0.2 * self.global_rank)
        if batch_idx % 2 == 0:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@quiet(f"{LIGHTNING}/issues/5131", world_size=3)
def closure_called_without_a_step(here: Here) -> None:
    """All ranks call the closure in each batch, and make a step in every other one."""
    here.fit(net=Halved(here))


class Agreed(L.Callback):
    """The first rank reads what the operator wants, and all ranks are told."""

    def __init__(self, here: Here) -> None:
        self.path = here.folder / "commands.json"

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            wanted = json.loads(self.path.read_text())["max_epochs"] if trainer.is_global_zero else None
            time.sleep(1.0 if trainer.is_global_zero else 0.0)
            trainer.fit_loop.max_epochs = trainer.strategy.broadcast(wanted)


@quiet(f"{LIGHTNING}/issues/11547", world_size=2, moment=Moment.EPOCH_END)
def epochs_added_on_all_ranks(here: Here) -> None:
    """A training goes on for two more epochs than it was begun with, which all ranks learn of at the same time."""
    if here.rank == 0:
        (here.folder / "commands.json").write_text(json.dumps({"max_epochs": 4}))
    here.fit(net=LoggingNet(here), callbacks=[Agreed(here)])


@quiet(f"{LIGHTNING}/issues/20544", world_size=3, moment=Moment.END)
def folds_that_one_host_has_finished_before(here: Here) -> None:
    """Which folds are done is what the first rank finds; the others leave out the same, whatever is on their disks."""
    scratch = here.folder / f"scratch-{here.rank}"
    scratch.mkdir()
    for fold in (0,) if here.rank == 0 else (0, 2):
        (scratch / f"{fold}.done").touch()
    for fold in range(3):
        trainer = here.trainer(max_epochs=1)
        if not trainer.strategy.broadcast((scratch / f"{fold}.done").exists()):
            net = LoggingNet(here)
            trainer.fit(net, rows(here, batches=2 + fold))
            trainer.test(net, rows(here, batches=2), verbose=False)
            time.sleep(0.5 * here.rank)
            (scratch / f"{fold}.done").touch()
    torch.save({"folds": 3}, scratch / "summary.pt")
