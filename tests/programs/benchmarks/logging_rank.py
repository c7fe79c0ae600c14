"""One rank of the benchmark of logging: runs short trainings one after the other and writes down their step times.

Started by ``logging_cost.py``, which says in JSON what each training logs, to where, and how.
"""

import argparse
import gc
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from one_rank import Model, StepTimer, make_loader

from lightning_ncclsafe import LoggerOffload, SafeDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import slow_storage

SCALARS = 10
IMAGE_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one training logs, and how.

    Attributes:
        how: ``"none"``: it has no logger. ``"stock"``: the logger as Lightning has it. ``"offload"``: LoggerOffload.
        to: Directory of the logger, or URL.
        steps: Steps, each of which logs ten scalars.
        latency_s: What a write to ``slow://`` takes.
        stall_s: For how long ``slow://`` does not answer, from step 30 on; for as long as there is anybody to wait if
            negative.
        logger: ``"tensorboard"`` or ``"csv"``.
        media: Whether every fifth step logs an image, and the step is one of Python code rather than of torch's.
    """

    how: str
    to: str
    steps: int
    latency_s: float = 0.0
    stall_s: float = 0.0
    logger: str = "tensorboard"
    media: bool = False


class LoggingModel(Model):
    """Logs ten scalars each step."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_is = training
        self.image = torch.rand(3, 512, 512)

    def training_step(self, batch: torch.Tensor | list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.training_is.media:
            return self.media_step(loss, batch_idx)
        self.log_dict({f"scalar{n}": float(batch_idx + n) for n in range(SCALARS)})
        return loss

    def media_step(self, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
        sum(range(180_000))
        if batch_idx % IMAGE_EVERY == 0 and self.logger is not None and self.trainer.is_global_zero:
            self.logger.experiment.add_image("image", self.image, batch_idx)  # type: ignore[attr-defined]
        return loss


class Stall(L.Callback):
    """Stops the storage at step 30, for a while."""

    def __init__(self, for_s: float, stall: Path) -> None:
        self.for_s, self.stall = for_s, stall

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 30 and trainer.is_global_zero:
            self.stall.touch()
            if self.for_s > 0:
                threading.Timer(self.for_s, self.stall.unlink, kwargs={"missing_ok": True}).start()


def make_logger(training: Training) -> Logger | bool:
    if training.how == "none":
        return False
    return (CSVLogger if training.logger == "csv" else TensorBoardLogger)(training.to)


def train(training: Training, ranks: int, folder: Path) -> dict[str, Any]:
    """Milliseconds of each step, and the seconds that the end took."""
    stall = folder / "stall"
    stall.unlink(missing_ok=True)
    os.environ |= {slow_storage.LATENCY_S: str(training.latency_s), slow_storage.STALL: str(stall)}
    timer = StepTimer()
    callbacks: list[L.Callback] = [timer]
    if training.how == "offload":
        callbacks.append(LoggerOffload(staging_dir=folder / "staging"))
    if training.stall_s and training.how != "none":
        callbacks.append(Stall(training.stall_s, stall))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=SafeDDP(),
        max_epochs=1,
        default_root_dir=folder,
        callbacks=callbacks,
        logger=make_logger(training),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = make_loader("known", training.steps + 1, 16, ranks)
    gc.collect()
    gc.freeze()
    trainer.fit(LoggingModel(training), loader)
    return {**timer.steps_ms(), "end_s": time.perf_counter() - timer.wall[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainings", help="JSON: a list of the attributes of Training")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    trainings = [Training(**said) for said in json.loads(options.trainings)]
    found = [train(training, options.ranks, options.result.parent) for training in trainings]
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
