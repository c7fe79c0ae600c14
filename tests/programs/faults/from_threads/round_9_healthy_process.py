"""Round 9 after public threads: trainings with odd saves, locks, children and threads, and nothing wrong with them."""

import fcntl
import json
import logging
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from threads import quiet
from training import Here, LoggingNet, Net
from truths import Moment

LOG = logging.getLogger("train")


@quiet("https://github.com/NVIDIA-NeMo/RL/pull/3504", world_size=3, moment=Moment.CHECKPOINT)
def tokenizer_written_by_all_ranks_at_once(here: Here) -> None:
    """The files have the same names and contents on all ranks."""

    class Saving(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            folder = here.folder / "tokenizer"
            folder.mkdir(exist_ok=True)
            for name in ("tokenizer_config.json", "vocab.json"):
                (folder / name).write_text(json.dumps({"size": 32_000}))
                time.sleep(0.2)

    here.fit(callbacks=[Saving()])


class Upload(threading.Thread):
    """Of weights, in the background."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(daemon=True)
        self.path, self.seconds = path, seconds

    def run(self) -> None:
        time.sleep(self.seconds)
        raise ConnectionResetError(104, "Connection reset by peer", str(self.path))


@quiet("https://github.com/ByteDance-Seed/VeOmni/pull/1162", world_size=3)
def upload_that_fails_beside_the_training(here: Here) -> None:
    """An exception ends the thread that uploads, on the first rank, and the training goes on."""

    class Uploading(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero and batch_idx == 1:
                Upload(here.folder / "weights.pt", 0.3).start()
            time.sleep(0.2)

    here.fit(net=LoggingNet(here), callbacks=[Uploading()])


@quiet("https://github.com/contember/okena/pull/166", world_size=2, moment=Moment.EPOCH_END)
def children_that_nobody_waits_for(here: Here) -> None:
    """Each rank starts programs, some of which fail, and asks for none of their exit codes."""

    class Starting(L.Callback):
        def __init__(self) -> None:
            self.children: list[subprocess.Popen[bytes]] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.children.append(subprocess.Popen(["false" if batch_idx % 2 else "true"]))

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                time.sleep(1.4)

    here.fit(callbacks=[Starting()])


@quiet("https://github.com/PrimeIntellect-ai/prime-rl/pull/1763", world_size=2, moment=Moment.CHECKPOINT)
def old_checkpoint_that_stays_for_now(here: Here) -> None:
    """What cannot be removed is tried again after the next epoch."""

    class Cleaning(L.Callback):
        def __init__(self) -> None:
            self.to_remove: list[Path] = []

        def remove(self, folder: Path) -> None:
            for attempt in range(3):
                try:
                    shutil.rmtree(folder / "optimizer")
                    return
                except OSError as problem:
                    LOG.warning("cannot remove %s, attempt %d: %s", folder, attempt, problem)
                    time.sleep(0.3)
            self.to_remove.append(folder)

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                folder = here.folder / f"epoch-{trainer.current_epoch}"
                folder.mkdir()
                torch.save(module.state_dict(), folder / "weights.pt")
                self.remove(folder)

    here.fit(callbacks=[Cleaning()], max_epochs=3)


@quiet("https://github.com/benfred/py-spy/issues/587", world_size=3)
def profiler_that_lets_go_again(here: Here) -> None:
    """The last rank is stopped for a moment, and goes on."""

    class Profiled(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if here.is_last and batch_idx == 2:
                subprocess.run(["sh", "-c", "kill -STOP $PPID; sleep 0.8; kill -CONT $PPID"], check=True)

    here.fit(net=LoggingNet(here), callbacks=[Profiled()])


@quiet("https://github.com/tox-dev/filelock/issues/397", world_size=3, moment=Moment.START)
def weights_loaded_by_one_rank_after_the_other(here: Here) -> None:
    """A lock keeps the ranks of a host from having two copies in memory at the same time."""

    class Large(Net):
        def configure_model(self) -> None:
            super().configure_model()
            with (here.folder / "loading.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                time.sleep(0.6)

    here.fit(net=Large(here))
