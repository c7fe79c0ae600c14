"""Round 22 after public threads: what users of Lightning do that takes long or differs by rank, and is no hang."""

import gc
import json
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from from_threads.round_15_lightning import LIGHTNING
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import in_order
from threads import quiet
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, MeetingNet, first_tensor, rows
from truths import Moment


class Collector(L.Callback):
    """Collects garbage on all ranks in the same steps, and never between them."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        gc.disable()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            gc.collect()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        gc.enable()


class Frames:
    """Refers to itself, and takes a moment to be let go of."""

    def __init__(self) -> None:
        self.reader = self

    def __del__(self) -> None:
        time.sleep(0.4)


class Watching(LoggingNet):
    """Opens a video in each step of the last rank."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.here.is_last:
            Frames()
        return super().training_step(batch, batch_idx)


@quiet("https://github.com/NVIDIA-NeMo/Automodel/pull/1391", world_size=3)
def garbage_collected_in_the_same_steps(here: Here) -> None:
    """All ranks collect garbage after every third step, of which the last one has more than the others."""
    here.fit(net=Watching(here), callbacks=[Collector(every=3)])


class Recached(Dataset[torch.Tensor]):
    """What cannot be read from the cache is made once more."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        cached = self.folder / f"{index}.json"
        try:
            return torch.tensor(json.loads(cached.read_text()))
        except (FileNotFoundError, json.JSONDecodeError) as error:
            if not isinstance(error, FileNotFoundError):
                print(f"{cached.name} is broken, and is made once more: {error}")
                cached.unlink()
                time.sleep(1.5)
        values = [index / 100] * 8
        cached.write_text(json.dumps(values))
        return torch.tensor(values)


@quiet("https://github.com/Project-MONAI/MONAI/pull/7244", world_size=3)
def file_of_a_cache_that_is_made_once_more(here: Here) -> None:
    """One file in the cache of the second rank is broken; its worker says so, and makes it once more."""
    folder = here.folder / f"cache-{here.rank}"
    folder.mkdir()
    if here.rank == 1:
        (folder / f"{3 * BATCH_SIZE * here.world_size + 1}.json").write_text("[0.3, 0.")
    data = Recached(folder, BATCHES * BATCH_SIZE * here.world_size)
    here.fit(net=LoggingNet(here), data=in_order(here, data, num_workers=1))


class Thorough(TorchCheckpointIO):
    """Reads what it has written, to be sure that it can be read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        time.sleep(0.8)
        torch.load(path, weights_only=False)


@quiet(f"{LIGHTNING}/issues/10389", world_size=2, moment=Moment.CHECKPOINT)
def checkpoint_read_again_after_each_epoch(here: Here) -> None:
    """The first rank is slow between epochs, as it saves and reads a checkpoint twice; the other one waits for that."""
    callbacks = [ModelCheckpoint(here.folder / "saved", save_last=True)]
    here.fit(net=LoggingNet(here), enable_checkpointing=True, callbacks=callbacks, plugins=[Thorough()])


class Shared(BaseManager):
    """Gives out what one process has, under an address."""


SEEN: dict[int, float] = {}
Shared.register("seen", callable=lambda: SEEN)


class Sharing(MeetingNet):
    """The ranks keep their losses with the first one, which serves them until all have ended."""

    def on_fit_start(self) -> None:
        path = str(self.here.folder / "shared")
        if self.global_rank == 0:
            server = Shared(path, authkey=b"losses").get_server()
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.trainer.strategy.barrier("server")
        manager = Shared(path, authkey=b"losses")
        manager.connect()
        self.seen: Any = manager.seen()  # type: ignore[attr-defined]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        number = self.global_step * self.here.world_size + self.global_rank
        self.seen.update({number: float(self.loss(first_tensor(batch)))})

    def on_fit_end(self) -> None:
        self.trainer.strategy.barrier("all have ended")
        if self.global_rank == 0:
            time.sleep(1.5)


@quiet("https://github.com/Project-MONAI/MONAI/pull/5595", world_size=3, moment=Moment.END)
def values_served_by_a_thread_of_the_first_rank(here: Here) -> None:
    """A thread of the first rank serves what all of them share, and its process ends later than the others."""
    here.fit(net=Sharing(here), data=(rows(here), rows(here, batches=2)))


class Measured(LoggingNet):
    """Knows how long an epoch takes from when all ranks are there, which the last one is a little later."""

    def on_train_epoch_start(self) -> None:
        if self.here.is_last:
            time.sleep(1.2)
        self.trainer.strategy.barrier("epoch")
        self.began = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        seconds = time.perf_counter() - self.began
        (self.here.folder / f"{self.global_rank}-{self.current_epoch}.txt").write_text(f"{seconds:.3f}")


@quiet("https://github.com/Lightning-AI/litgpt/pull/833", world_size=4)
def clock_that_starts_when_all_ranks_are_there(here: Here) -> None:
    """All ranks wait for the last one before each epoch, and each writes down how long that epoch took."""
    here.fit(net=Measured(here))
