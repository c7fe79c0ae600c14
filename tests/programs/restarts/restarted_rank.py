"""One rank of a training that goes wrong once, and goes on: ``python restarted_rank.py FOLDER FAULT RANK BATCH DELAY``.

What has happened is written to ``FOLDER/events``, a line each: starts, steps, and in the end a digest of the weights.
"""

import ctypes
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

BEGAN_S = time.time()

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from lightning_ncclsafe import JustInTimeCheckpoint, LoaderTuner, SafeDDP  # noqa: E402

EPOCHS, BATCH, WINDOW, SAMPLES = 4, 4, 3, 160
LIMIT_S, SUSPECT_S, PACE_S = 8.0, 3.0, 0.02
FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]
RANK, AT_BATCH, DELAY_S = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
ROWS = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
HOME = int(os.environ.get("RANK", "0"))


def note(event: str, *values: object) -> None:
    # One write of a short line: whole, whoever else writes.
    line = " ".join(map(str, (time.time(), HOME, os.getpid(), event, *values)))
    with open(FOLDER / "events", "ab", buffering=0) as events:
        events.write(f"{line}\n".encode())


def is_due() -> bool:
    """In the first start only, on one rank."""
    if HOME != RANK or FAULT == "none":
        return False
    try:
        (FOLDER / "struck").touch(exist_ok=False)
    except FileExistsError:
        return False
    note("struck", FAULT)
    return True


def for_ever(*_: object) -> None:
    while True:
        time.sleep(60)


def hold_the_gil() -> None:
    # Called by the thread that strikes: from then on no other thread runs Python.
    ctypes.PyDLL(None).sleep(600)


def raise_soon() -> None:
    """In the main thread, wherever it is in Python next."""
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(RuntimeError))


def stall_the_writer() -> None:
    torch.save = for_ever


def kill_the_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil-held": hold_the_gil,
    "raised": raise_soon,
    "stalled-writer": stall_the_writer,
    "stuck-loader": lambda: setattr(Noisy, "is_stuck", True),
    "lost-store": kill_the_agent,
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigterm-agent": lambda: os.kill(os.getppid(), signal.SIGTERM),
}


class Noisy(Dataset[Any]):
    is_stuck = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if Noisy.is_stuck:
            for_ever()
        return ROWS[index] + random.random()


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.fit_loop.total_batch_idx == AT_BATCH and is_due():
            timer = threading.Timer(DELAY_S, FAULTS[FAULT])
            timer.daemon = True
            timer.start()
        time.sleep(PACE_S)
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.trainer.fit_loop._should_accumulate() and HOME == 0:
            note("step", self.trainer.global_step)


def main() -> None:
    note("start", BEGAN_S)
    L.seed_everything(1, workers=True, verbose=False)
    model = Model()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        # Else DDP puts its buckets in another order after the first step of each start, and of three or more ranks gloo
        # then adds the gradients up in another order: the last bits differ, with stock as well.
        strategy=SafeDDP(timeout=timedelta(seconds=LIMIT_S), suspect_after=SUSPECT_S, find_unused_parameters=True),
        max_epochs=EPOCHS,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=1.0,
        callbacks=[
            JustInTimeCheckpoint(FOLDER / "just-in-time", resume=True),
            ModelCheckpoint(FOLDER / "regular", save_top_k=2, monitor="val_loss"),
            LoaderTuner(),
        ],
        default_root_dir=FOLDER,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    trainer.fit(
        model,
        DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
        DataLoader(Noisy(), batch_size=BATCH),
    )
    if not trainer.interrupted and trainer.current_epoch >= EPOCHS:
        weights = torch.cat([part.flatten() for part in model.state_dict().values()])
        note("end", trainer.global_step, hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
