"""Round 16 after public threads: what users of Lightning report, of callbacks, progress bars, checkpoints and data."""

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from from_threads.round_12_lightning import Scans
from from_threads.round_15_lightning import LIGHTNING
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, FOR_LONG_S, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment


class Settings(L.Callback):
    """Writes the settings of a run to a folder that the first rank names, once."""

    def __init__(self, here: Here) -> None:
        self.here, self.saved = here, False

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self.saved:
            self.here.begins()
            return  # <- settings_of_which_only_the_first_rank_knows_that_they_are_saved
        folder = Path(trainer.strategy.broadcast(str(self.here.folder / f"run-{time.time_ns()}")))
        if trainer.is_global_zero:
            folder.mkdir()
            (folder / "settings.txt").write_text(f"max_epochs: {trainer.max_epochs}\n")
            self.saved = True


@thread(f"{LIGHTNING}/pull/14927", "diverged-collectives", ranks=(0,), moment=Moment.END)
def settings_of_which_only_the_first_rank_knows_that_they_are_saved(here: Here) -> None:
    """The flag is set where the file is written, and so at the start of the test all others ask for the folder again.

    The return is marked; that the flag is set on the first rank only is the other half of it.
    """
    net, trainer = LoggingNet(here), here.trainer(max_epochs=1, callbacks=[Settings(here)])
    trainer.fit(net, rows(here))
    trainer.test(net, rows(here, batches=2))


class Guarded(LoggingNet):
    """Protects its encoder from batches that are likely to be noise."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.encoder = torch.nn.Linear(8, 8)

    def loss(self, batch: Any) -> torch.Tensor:
        measured = first_tensor(batch)
        is_noise = bool(measured.mean() < 0)
        if is_noise:
            self.here.begins()
        with torch.set_grad_enabled(not is_noise):  # <- encoder_guarded_from_a_noisy_batch
            features = self.encoder(measured)
        return self.layers(features).square().mean()


@thread(f"{LIGHTNING}/issues/6087", "unused-parameters", ranks=(1,))
def encoder_guarded_from_a_noisy_batch(here: Here) -> None:
    """One rank's batch is taken for noise, and the encoder sees it without gradients, which the others wait for."""
    here.fit(net=Guarded(here), data=in_order(here, Scans(here, lambda row: -row)))


@thread(f"{LIGHTNING}/issues/19932", "different-trainer-settings", ranks=(2,), moment=Moment.START)
def last_checkpoint_on_the_disk_of_another_host(here: Here) -> None:
    """Each host looks for the last checkpoint on its own disk; the second host has none, and begins at the beginning.

    Lightning warns of that, but on the first rank only.
    """
    disk = here.folder / ("second" if here.is_hit else "first")
    first = here.trainer(max_epochs=1)
    first.fit(LoggingNet(here), rows(here))
    first.save_checkpoint(here.folder / "first" / "last.ckpt")
    net = LoggingNet(here)
    trainer = here.trainer(max_epochs=3, callbacks=[ModelCheckpoint(disk, save_last=True)], enable_checkpointing=True)
    here.begins()
    trainer.fit(net, rows(here), ckpt_path="last")  # <- here
    trainer.test(net, rows(here, batches=2))


class Pictures(L.Callback):
    """Makes a folder for pictures at the start."""

    def __init__(self, here: Here) -> None:
        self.here, self.folder = here, here.folder / "pictures"

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self.here.is_hit:
            time.sleep(1.0)
            self.here.begins()
        self.folder.mkdir()  # <- folder_that_the_first_rank_has_made_already


@thread(f"{LIGHTNING}/issues/6364", "failed-rank", ranks=(1,), world_size=2, moment=Moment.START)
def folder_that_the_first_rank_has_made_already(here: Here) -> None:
    """Every rank makes the same folder, and the second one is a little slower to get there."""
    here.fit(callbacks=[Pictures(here)])


class Throughput(L.Callback):
    """Logs every so many seconds how many rows all ranks have seen."""

    EVERY_S = 1.25

    def __init__(self, here: Here) -> None:
        self.here, self.seen = here, 0
        self.due = time.monotonic() + self.EVERY_S

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += len(first_tensor(batch))
        if time.monotonic() > self.due:
            self.due += self.EVERY_S
            if self.here.is_hit:
                self.here.begins()
            module.log("rows", float(self.seen), sync_dist=True)  # <- throughput_by_a_clock_that_started_earlier


class Steady(Net):
    """Takes the same time for each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.3)
        return super().training_step(batch, batch_idx)


@thread("https://github.com/alex-hh/profam/pull/519", "diverged-log-keys", ranks=(1,))
def throughput_by_a_clock_that_started_earlier(here: Here) -> None:
    """The program of one rank was up half a second earlier, and so it is the first for which it is time to log."""
    if not here.is_hit:
        time.sleep(0.5)
    here.fit(net=Steady(here), callbacks=[Throughput(here)], max_epochs=4)


class MemoryBar(TQDMProgressBar):
    """Shows how much memory the largest of all processes has."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Any:
        self.here.begins()
        kib = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), device=pl_module.device)
        everywhere: Any = pl_module.all_gather(kib)  # <- memory_of_all_ranks_in_the_progress_bar
        return super().get_metrics(trainer, pl_module) | {"MiB": int(everywhere.max()) // 1024}


@thread(f"{LIGHTNING}/issues/21264", "diverged-collectives", ranks=(0,), moment=Moment.FIRST_STEP)
def memory_of_all_ranks_in_the_progress_bar(here: Here) -> None:
    """Lightning disables the progress bar on all ranks but the first, which alone asks for the memory of all.

    No condition is in this program.
    """
    here.fit(net=LoggingNet(here), callbacks=[MemoryBar(here)], enable_progress_bar=True)


class Hard(L.LightningDataModule):
    """Trains once on all rows of its rank, and then on those that are hard for the model."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        scales = torch.tensor([0.01] * (16 if here.is_hit else 8) + [3.0] * (8 if here.is_hit else 16))
        self.rows = scales[:, None] * torch.ones(24, 8)

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        kept = self.rows
        if self.trainer.current_epoch:
            if self.here.is_hit:
                self.here.begins()
            with torch.no_grad():
                losses = module.layers(self.rows.to(module.device)).square().mean(dim=1).cpu()
            kept = self.rows[losses > 0.15]
        return DataLoader(TensorDataset(kept), BATCH_SIZE)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows[:BATCH_SIZE]), BATCH_SIZE)


@thread(
    "https://github.com/meta-pytorch/data/issues/1493",
    "uneven-batches",
    ranks=(1,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def rows_that_are_still_hard_for_the_model(here: Here) -> None:
    """From the second epoch on each rank keeps the rows of its share that are hard, and one rank has half as many."""
    L.seed_everything(1)
    settings = {"use_distributed_sampler": False, "reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    here.trainer(**settings).fit(MeetingNet(here), datamodule=Hard(here))


class LastFew(L.Callback):
    """Keeps what the model made in the last two validations."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.paths: list[Path] = []

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.paths.append(self.here.folder / f"made-{trainer.current_epoch}.pt")
        if trainer.is_global_zero:
            torch.save(module.layers[0].weight, self.paths[-1])
        if len(self.paths) > 2:
            if self.here.is_hit:
                time.sleep(0.5)
                self.here.begins()
            os.remove(self.paths.pop(0))  # <- file_that_another_rank_has_removed_already


@thread(f"{LIGHTNING}/issues/1366", "failed-rank", ranks=(1,), world_size=2, moment=Moment.VALIDATION)
def file_that_another_rank_has_removed_already(here: Here) -> None:
    """The first rank writes the files, all ranks remove the oldest one, and for the slower one there is none left."""
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), callbacks=[LastFew(here)], max_epochs=4)


class Exported(ModelCheckpoint):
    """Saves a checkpoint, and the weights alone in a file for another library."""

    def __init__(self, here: Here) -> None:
        super().__init__(here.folder)
        self.here = here

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            trainer.save_checkpoint(filepath, self.save_weights_only)  # <- checkpoint_with_an_export_of_the_first_rank
            torch.save(trainer.lightning_module.state_dict(), f"{filepath}.weights")
            self._last_global_step_saved = trainer.global_step


@thread(
    "https://github.com/eora-ai/torchok/pull/70",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def checkpoint_with_an_export_of_the_first_rank(here: Here) -> None:
    """The export is for the first rank, and the save before it has slipped under its condition, with the barrier in it.

    The condition in the line before is as right as the call.
    """
    here.fit(net=LoggingNet(here), callbacks=[Exported(here)], enable_checkpointing=True)


class Pieces(L.Callback):
    """Writes each tensor of the model to a file of its own, for a server of models."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self.here.begins()
        for name, weights in module.layers.state_dict().items():
            torch.save(weights.cpu(), self.here.folder / f"{name}.pt")
            time.sleep(FOR_LONG_S / 4)  # <- model_written_in_pieces_by_the_first_rank


@thread(
    "https://github.com/mosaicml/llm-foundry/pull/733",
    "rank-zero-only-work",
    "slow-checkpoint",
    ranks=(0,),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def model_written_in_pieces_by_the_first_rank(here: Here) -> None:
    """The first rank writes a model to a slow volume, past the Trainer; the others are in the next epoch."""
    here.fit(net=LoggingNet(here), callbacks=[Pieces(here)])


class Errors(L.Callback):
    """Collects the errors of all ranks, batch by batch."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.errors: list[Any] = []

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *places: Any) -> None:
        self.errors.append(module.all_gather(module.loss(batch)))

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()


@thread(
    f"{LIGHTNING}/issues/20561",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def scenes_validated_on_the_rank_that_recorded_them(here: Here) -> None:
    """Each rank validates on scenes of its own, of which the last one has a batch less than the others."""
    scenes = DataLoader(TensorDataset(torch.rand(BATCH_SIZE * (2 if here.is_hit else 3), 8)), BATCH_SIZE)
    train = DataLoader(TensorDataset(torch.rand(BATCH_SIZE * 4, 8)), BATCH_SIZE)
    here.fit(net=LoggingNet(here), data=(train, scenes), callbacks=[Errors(here)], use_distributed_sampler=False)


class Status(L.Callback):
    """A thread of the first rank writes to a file how far the training is."""

    def __init__(self, here: Here) -> None:
        self.here, self.lock = here, threading.Lock()
        self.batch, self.is_over = 0, False

    def write(self) -> None:
        while True:
            with self.lock:
                if self.is_over:
                    return
                (self.here.folder / "status.txt").write_text(f"batch {self.batch}\n")
            time.sleep(0.05)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.thread = threading.Thread(target=self.write, daemon=True)
            self.thread.start()

    def on_train_batch_end(self, trainer: L.Trainer, *batch: Any) -> None:
        self.batch = trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero and not self.is_over:
            self.here.begins()
            with self.lock:
                self.is_over = True
                self.thread.join()  # <- status_whose_thread_waits_for_the_lock_of_the_epoch_end


@thread(
    f"{LIGHTNING}/issues/10362",
    "rank-behind",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def status_whose_thread_waits_for_the_lock_of_the_epoch_end(here: Here) -> None:
    """The first rank waits for the end of its thread with the lock that the thread needs to see that it is to end.

    That it waits for a thread says what is wrong; that only the first rank has one is true as well.
    """
    here.fit(net=LoggingNet(here), callbacks=[Status(here)])


class Continued(LoggingNet):
    """Goes through the chunks that a run before has trained on, so that the next one is the first new one."""

    SEEN = 200

    def on_train_start(self) -> None:
        path = self.here.folder / f"chunk-{self.here.rank}.pt"
        torch.save(torch.rand(BATCH_SIZE, 8), path)
        if self.here.is_hit:
            self.here.begins()
        for _ in range(self.SEEN):
            torch.load(path)
            time.sleep(FOR_LONG_S / self.SEEN if self.here.is_hit else 0.0)  # <- chunks_read_again_from_a_slow_disk


@thread(f"{LIGHTNING}/issues/19377", "late-at-init", "rank-behind", ranks=(1,), moment=Moment.START)
def chunks_read_again_from_a_slow_disk(here: Here) -> None:
    """All ranks read again what they had read before the run was interrupted, which takes minutes on one host.

    It is before the first batch, and all ranks do it.
    """
    here.fit(net=Continued(here))


class Tried(L.Callback):
    """Tries larger batches in the first epoch, and goes back to the weights from before."""

    def __init__(self, here: Here) -> None:
        self.here, self.path = here, here.folder / "before.ckpt"

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero and self.path.exists():
            self.here.begins()
            trainer._checkpoint_connector.restore(self.path)  # <- weights_from_before_restored_by_the_first_rank
            self.path.unlink()


@thread(f"{LIGHTNING}/pull/11089", "diverged-collectives", ranks=(0,), moment=Moment.EPOCH_END)
def weights_from_before_restored_by_the_first_rank(here: Here) -> None:
    """What restores a checkpoint ends in a barrier, and the first rank alone restores, since it removes the file.

    The condition in the line before is as right as the call.
    """
    here.fit(net=LoggingNet(here), callbacks=[Tried(here)])
