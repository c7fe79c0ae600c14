"""A training in which one rank does at one batch what the command line says, and which is saved then.

Run by the tests as a program: ``python saved_fit.py raise --rank=1 --batch=3``; ``--resume`` goes on from the newest.
"""

import argparse
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from trained import Remembers, Stateful, Trained

from lightning_ncclsafe import JustInTimeCheckpoint, SafeDDP

BATCHES = 8


def fail() -> None:
    raise ValueError("the batch is broken")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_told_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stall() -> None:
    threading.Event().wait(60)


def be_stuck_and_told_to_end() -> None:
    """In C, as in a collective, where no handler in Python runs."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    threading.Timer(0.2, be_told_to_end).start()
    for _ in range(2):  # of which the second waits for the first
        libc.pthread_mutex_lock(mutex)


def be_told_to_end_and_come_late() -> None:
    """In C as well, and after most of the time that there is."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)

    def hold() -> None:
        libc.pthread_mutex_lock(mutex)
        is_held.set()
        be_told_to_end()
        time.sleep(6.0)
        print("the batch goes on", flush=True)
        libc.pthread_mutex_unlock(mutex)

    is_held = threading.Event()
    threading.Thread(target=hold).start()
    is_held.wait(30)
    libc.pthread_mutex_lock(mutex)


DEEDS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "raise": fail,
    "kill": be_killed,
    "sigterm": be_told_to_end,
    "sigterm-stuck": be_stuck_and_told_to_end,
    "sigterm-late": be_told_to_end_and_come_late,
    "stall": stall,
}


class Says(pl.Callback):
    """Which steps have been made; and into a file, for whoever strikes at it, what is being done."""

    def __init__(self, stage: Path | None) -> None:
        self._stage = stage

    def _is_at(self, stage: str, for_s: float = 0.0) -> None:
        if self._stage is not None:
            # Whole at any moment, for whoever reads it.
            beside = self._stage.with_suffix(".new")
            beside.write_text(stage)
            beside.rename(self._stage)
            time.sleep(for_s)

    def on_sanity_check_start(self, *args: object) -> None:
        self._is_at("sanity check", 0.1)

    def on_train_epoch_start(self, *args: object) -> None:
        self._is_at("between epochs")

    def on_train_batch_start(self, trainer: pl.Trainer, *args: object) -> None:
        # Gradients of the batch before wait for this one's.
        begins = trainer.fit_loop.epoch_loop.batch_progress.current.completed % trainer.accumulate_grad_batches == 0
        self._is_at("first batch of a step" if begins else "accumulation")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        print(f"step {trainer.global_step} was made", flush=True)

    def on_validation_start(self, trainer: pl.Trainer, *args: object) -> None:
        if not trainer.sanity_checking:
            self._is_at("validation")

    def on_save_checkpoint(self, *args: object) -> None:
        self._is_at("save", 0.02)

    def on_train_epoch_end(self, *args: object) -> None:
        self._is_at("between epochs", 0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--batch", type=int, default=11, help="of all epochs, from 0")
    parser.add_argument("--hook", default="training_step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=3.0)
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sanity", action="store_true")
    parser.add_argument("--validate-every", type=int)
    parser.add_argument("--save-every", type=int, default=0, help="steps between those of a ModelCheckpoint")
    parser.add_argument("--says-stage", action="store_true")
    parser.add_argument("--root-dir", type=Path, required=True)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    passed = 0

    def at(hook: str) -> None:
        nonlocal passed
        if hook == "training_step":
            time.sleep(options.pace)
        if hook != options.hook or options.resume:
            return
        passed += 1
        if passed - 1 == options.batch and rank == options.rank:
            DEEDS[options.deed]()

    folder = options.root_dir / "checkpoints"
    found = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    torch.set_num_threads(1)
    every = options.save_every
    regular = ModelCheckpoint(options.root_dir, every_n_train_steps=every or 10_000)
    model = Trained(at=at)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=2 if options.sanity else 0,
        val_check_interval=options.validate_every,
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        default_root_dir=options.root_dir,
        callbacks=[
            Remembers(),
            Says(options.root_dir / f"stage-{rank}" if options.says_stage else None),
            JustInTimeCheckpoint(folder, grace=options.grace),
            OnExceptionCheckpoint(options.root_dir),
            regular,
        ],
        strategy=SafeDDP(suspect_after=1.0, timeout=timedelta(seconds=options.timeout), process_group_backend="gloo"),
    )
    path = str(found[-1]) if options.resume else None
    trainer.fit(model, Stateful(BATCHES, rank), Stateful(2, rank), ckpt_path=path)
    if rank == 0:
        torch.save(model.state_dict(), options.root_dir / "weights.pt")
    print(f"rank {rank} has made {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
