"""Trainings whose loops and hooks take their time, and of which nothing is to be said."""

import time
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from training import Here, Net, rows
from truths import Moment, healthy


@healthy({Moment.VALIDATION: (2, 3)})
def long_validation(here: Here) -> None:
    class Evaluating(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            time.sleep(1.5 if here.rank else 1.1)
            self.log("val_loss", self.loss(batch), sync_dist=True)

    here.fit(net=Evaluating(here), max_epochs=1)


@healthy({Moment.VALIDATION: (2,)})
def several_loaders(here: Here) -> None:
    class Several(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            time.sleep(0.2 * here.rank)
            self.log("val_loss", self.loss(batch), sync_dist=True)

    training = {"a": rows(here), "b": rows(here, batches=4)}
    here.fit(net=Several(here), data=(training, [rows(here), rows(here, batches=2)]))


@healthy({Moment.EPOCH_END: (2, 3)})
def big_checkpoint(here: Here) -> None:
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(9)
            super().save_checkpoint(*args, **kwargs)

    callback = ModelCheckpoint(here.folder / "checkpoints", save_top_k=1)
    here.fit(enable_checkpointing=True, callbacks=[callback], plugins=[Slow()], max_epochs=1)


@healthy({Moment.EPOCH_END: (2,)})
def short_evaluation_on_rank_zero(here: Here) -> None:
    def evaluate(net: Net) -> None:
        if net.trainer.is_global_zero:
            time.sleep(4)

    here.fit(evaluate)


@healthy({Moment.VALIDATION: (2, 3)})
def evaluation_only(here: Here) -> None:
    class Evaluating(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            time.sleep(0.6 if here.rank else 0.1)
            self.log("val_loss", self.loss(batch), sync_dist=True)

        test_step = validation_step

    trainer = here.trainer()
    trainer.validate(Evaluating(here), rows(here))
    trainer.test(Evaluating(here), rows(here))


@healthy({Moment.MIDDLE: (2, 3)})
def prediction_of_unequal_shards(here: Here) -> None:
    class Predicting(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.7 * (1 + here.rank))
            return super().predict_step(batch, batch_idx)

    here.trainer().predict(Predicting(here), rows(here, batches=5))


@healthy({Moment.EPOCH_END: (2,)})
def early_stopping_on_all_ranks(here: Here) -> None:
    class Watched(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", torch.tensor(float(self.current_epoch + here.rank)), sync_dist=True)

    stop = EarlyStopping("val_loss", patience=1)
    here.fit(net=Watched(here), data=(rows(here), rows(here)), callbacks=[stop], max_epochs=9)
