"""Trainings of public threads in which one rank, mostly the first, does or saves what the others do not."""

import errno
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from training import Here, MeetingNet, Net, rows
from truths import Moment, fault, odd_one_out


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/talmolab/sleap-nn/pull/476",
)
def metrics_that_are_reduced_when_they_are_read(here: Here) -> None:
    """Reading `callback_metrics` under `if is_global_zero` reduces what was logged with sync_dist: on rank 0 alone."""

    class Table(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                metrics = trainer.callback_metrics  # <- here
                (here.folder / "table.csv").write_text(",".join(metrics))

    class Scored(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.all_gather(torch.ones(5))

    here.fit(net=Scored(here), callbacks=[Table()])


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.VALIDATION: (4,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/torchmetrics/issues/2684",
)
def quality_of_samples_measured_on_rank_zero(here: Here) -> None:
    """A metric that gathers its states is computed in a hook that is decorated with `rank_zero_only`."""

    class Generator(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.distance = torchmetrics.MeanSquaredError()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            (images,) = batch
            self.distance.update(images, images.flip(0))

        @rank_zero_only
        def on_validation_end(self) -> None:
            here.begins()
            value = self.distance.compute()  # <- here
            (here.folder / "distance.txt").write_text(str(value))

    here.fit(net=Generator(here), data=(rows(here), rows(here)))


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.EPOCH_END: (2,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/89716",
)
def samples_drawn_through_the_wrapper(here: Here) -> None:
    """One rank calls the model as DDP has wrapped it, which broadcasts its buffers before each forward pass."""

    class Normalized(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.layers.append(torch.nn.BatchNorm1d(2))

        def forward(self, noise: torch.Tensor) -> torch.Tensor:
            return self.layers(noise)

    class Samples(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.global_rank == 0:
                self.draw(trainer)

        def draw(self, trainer: L.Trainer) -> None:
            here.begins()
            images = trainer.model(torch.randn(4, 8))  # <- here
            torch.save(images, here.folder / "samples.pt")

    here.fit(net=Normalized(here), callbacks=[Samples()])


@fault(
    "diverged-log-keys",
    ranks=(0,),
    at={Moment.VALIDATION: (4,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/19783",
)
def accuracy_logged_under_is_global_zero(here: Here) -> None:
    """What was collected in validation is scored on rank 0, and logged from there with sync_dist."""

    class Clustered(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.collected: list[torch.Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.collected.append(self.predict_step(batch, batch_idx))

        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                accuracy = torch.cat(self.collected).mean()
                here.begins()
                self.log("val_accuracy", accuracy, sync_dist=True)  # <- here
            self.collected.clear()

    here.fit(net=Clustered(here), data=(rows(here), rows(here)))


@fault(
    "failed-rank",
    ranks=(1, 2),
    at={Moment.VALIDATION: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/15852",
    whose="code",
)
def monitor_that_only_rank_zero_has_logged(here: Here) -> None:
    """The score is logged on rank 0; ModelCheckpoint looks for it on all ranks, and raises where it is not."""

    class Scored(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            outputs = self.all_gather(torch.ones(4))
            here.begins()
            if self.global_rank == 0:
                self.log("val_auc", outputs.mean(), rank_zero_only=True)

    callback = ModelCheckpoint(here.folder / "checkpoints", monitor="val_auc", save_top_k=2, mode="max")
    here.fit(net=Scored(here), data=(rows(here), rows(here)), enable_checkpointing=True, callbacks=[callback])


@fault(
    "diverged-collectives",
    ranks=odd_one_out,
    at={Moment.CHECKPOINT: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/19045",
)
def best_name_that_differs_between_ranks(here: Here) -> None:
    """Each rank monitors its own loss: to one the new best file is the old one, another looks for a free name."""
    losses = {0: (0.52, 0.48, 0.47, 0.46), 1: (0.61, 0.33, 0.32, 0.31)}[here.rank]

    class Watched(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if self.current_epoch:
                here.begins()
            self.log("val_loss", losses[self.current_epoch])

    callback = ModelCheckpoint(here.folder / "checkpoints", monitor="val_loss", filename="{val_loss:.1f}")
    trained = {"enable_checkpointing": True, "callbacks": [callback], "max_epochs": 4}
    here.fit(net=Watched(here), data=(rows(here), rows(here)), **trained)


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.END: (3,)},
    has_phase=False,
    source="https://github.com/alan-turing-institute/autocast/pull/386",
)
def final_checkpoint_saved_by_rank_zero_alone(here: Here) -> None:
    """After `fit` rank 0 saves under an alias, which ends in a barrier; it takes that of the test for its own."""
    trainer, net = here.trainer(max_epochs=1), Evaluated(here)
    trainer.fit(net, rows(here))
    if trainer.is_global_zero:
        here.begins()
        trainer.save_checkpoint(here.folder / "final.ckpt")  # <- here
    trainer.test(net, rows(here))


class Evaluated(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


@fault(
    "unfinished-rank",
    "diverged-collectives",
    ranks=(0,),
    at={Moment.END: (2,)},
    has_phase=False,
    source="https://github.com/roboflow/rf-detr/issues/1505",
    whose="code",
)
def best_weights_tested_at_fit_end_on_rank_zero(here: Here) -> None:
    """A callback tests the best weights with the same Trainer, on the main process only; the others have returned."""

    class BestModel(L.Callback):
        def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if not trainer.is_global_zero:
                return
            here.begins()
            trainer.test(module, rows(here))  # <- here

    here.fit(net=Evaluated(here), callbacks=[BestModel()], max_epochs=1)


@fault(
    "slow-logger",
    ranks=(0,),
    at={Moment.CHECKPOINT: (3,)},
    has_phase=False,
    source="https://github.com/open-mmlab/mmsegmentation/issues/2137",
)
def artifact_that_the_server_never_confirms(here: Here) -> None:
    """After each checkpoint the logger uploads it from rank 0; the server takes the connection, and never answers."""
    server = socket.create_server(("127.0.0.1", 0))

    class Artifacts(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            here.begins()
            upload(Path(checkpoint_callback.best_model_path), server.getsockname()[1])

    callback = ModelCheckpoint(here.folder / "checkpoints")
    here.fit(enable_checkpointing=True, callbacks=[callback], logger=Artifacts(str(here.folder)))


def upload(path: Path, port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/artifacts/{path.name}", path.read_bytes())
    urllib.request.urlopen(request)  # <- artifact_that_the_server_never_confirms


@fault(
    "exception-during-save",
    ranks=(0,),
    at={Moment.CHECKPOINT: (4,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/433",
    whose="code",
)
def hyperparameters_that_only_rank_zero_pickles(here: Here) -> None:
    """All ranks collect the same state, only rank 0 writes it, and only there it shows that it cannot be pickled."""

    class Configured(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            here.begins()
            checkpoint["arguments"] = {"parse": lambda text: text, "lock": threading.Lock()}

    here.fit(net=Configured(here), enable_checkpointing=True, callbacks=[ModelCheckpoint(here.folder / "checkpoints")])


@fault(
    "checkpoint-skipped-barrier",
    ranks=(0,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/marin-community/levanter/issues/486",
)
def failed_save_that_is_only_logged(here: Here) -> None:
    """There is no room for the checkpoint; the rank that writes notes that and trains on, the others wait for it."""

    class Careful(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            needed = 10**15
            if shutil.disk_usage(here.folder).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            super().save_checkpoint(checkpoint, path, storage_options)

    class EveryFewSteps(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == 3:
                here.begins()
                try:
                    trainer.save_checkpoint(here.folder / "step-3.ckpt")  # <- here
                except OSError as error:
                    print(f"could not save: {error}")

    here.fit(callbacks=[EveryFewSteps()], plugins=[Careful()])


@fault(
    "diverged-collectives",
    ranks=(-1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/speechbrain/speechbrain/issues/1166",
)
def checkpoint_by_each_ranks_own_clock(here: Here) -> None:
    """Ranks save every so many minutes; by the clock of one it is time, and the others are a moment short of it."""

    class Timed(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.saved_s = time.monotonic() - (100 if here.is_last else 0)

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if time.monotonic() - self.saved_s > 90 and trainer.global_step == 4:
                here.begins()
                trainer.save_checkpoint(here.folder / "intra-epoch.ckpt")  # <- here
                self.saved_s = time.monotonic()

    here.fit(callbacks=[Timed()])


@fault(
    "unfinished-rank",
    "slow-checkpoint",
    ranks=(0,),
    at={Moment.END: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/GoogleCloudPlatform/gcs-connector-for-pytorch/pull/138",
    whose="either",
)
def asynchronous_save_that_teardown_waits_for(here: Here) -> None:
    """The last checkpoint is still being written in a thread; the Trainer of rank 0 waits for it, the others test."""
    bucket = here.folder / "bucket"

    class Mounted(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            os.mkfifo(bucket)
            here.begins()
            with bucket.open("wb") as stream:
                torch.save(checkpoint, stream)

    trainer, net = here.trainer(max_epochs=1, plugins=[AsyncCheckpointIO(Mounted())]), Saving(here)
    trainer.fit(net, rows(here))
    here.trainer().test(net, rows(here))


class Saving(Evaluated):
    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.here.folder / "last.ckpt")


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.EPOCH_END: (2,)},
    source="https://github.com/Theano/Theano/pull/1793",
)
def command_that_says_more_than_a_pipe_holds(here: Here) -> None:
    """Rank 0 records what the code was; it waits for the end of a command that waits for somebody to read."""

    class Provenance(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.record()

        @rank_zero_only
        def record(self) -> None:
            here.begins()
            command = subprocess.Popen(["seq", "100000"], stdout=subprocess.PIPE)
            command.wait()  # <- here
            (here.folder / "diff.txt").write_bytes(command.stdout.read())

    here.fit(callbacks=[Provenance()])


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.EPOCH_END: (4,)},
    has_phase=False,
    source="https://github.com/EleutherAI/sparsify/pull/5",
)
def save_that_others_leave_before_its_barrier(here: Here) -> None:
    """The method returns early where there is nothing to write; the barrier is in its last line."""

    class Saver(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            save_weights(here, module)

    here.fit(callbacks=[Saver()])


def save_weights(here: Here, module: L.LightningModule) -> None:
    if dist.get_rank() != 0:
        return
    torch.save(module.state_dict(), here.folder / "weights.pt")
    here.begins()
    dist.barrier()  # <- save_that_others_leave_before_its_barrier
