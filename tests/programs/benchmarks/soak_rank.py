"""One rank of the soak: trains until its time is over, with validation, checkpoints and TensorBoard.

Started by ``soak.py``, which looks at this process from outside; what only rank 0 can see, it writes down.
"""

import argparse
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from one_rank import WIDTH, Model, make_loader
from torch.utils.data import DataLoader, TensorDataset

LOG_EVERY_STEPS = 10
VALIDATIONS_AN_EPOCH = 2
TELL_EVERY_S = 5.0


class SoakModel(Model):
    """Logs while it trains and while it validates, as models do.

    Args:
        step_s: The least that a step takes, so that a host that gets less busy does not train faster.
    """

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.due_s = 0.0

    def training_step(self, batch: torch.Tensor | list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(max(self.due_s - time.monotonic(), 0.0))
        self.due_s = time.monotonic() + self.step_s
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"loss": loss, **{f"scalar{n}": float(batch_idx + n) for n in range(4)}})
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch[0]).square().mean(), sync_dist=True)


class Told(L.Callback):
    """On rank 0, writes down every few seconds how many steps were made, and how many keys the job's store has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told_s = 0.0
        self.store: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.is_global_zero or time.monotonic() - self.told_s < TELL_EVERY_S:
            return
        self.told_s = time.monotonic()
        # A connection of its own: the default group's is in use.
        self.store = self.store or dist.distributed_c10d._get_default_store().clone()
        written = self.path.with_suffix(".part")
        written.write_text(f"{trainer.global_step} {self.store.num_keys()}")
        written.replace(self.path)


def guarded(kind: str, folder: Path) -> tuple[Any, list[L.Callback]]:
    if kind == "stock":
        return DDPStrategy(), []
    # Not at the top: a process that trains with stock alone must not load the package.
    from lightning_ncclsafe import LoggerOffload, SafeDDP, safe_callbacks

    strategy = SafeDDP(report_dir=folder / "own" / "reports")
    offload = LoggerOffload(staging_dir=folder / "own" / "staging")
    return strategy, safe_callbacks(offload) if kind == "all" else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", required=True, help="stock, safe or all")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--epoch-steps", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    folder = options.result.parent
    strategy, callbacks = guarded(options.kind, folder)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=strategy,
        max_epochs=-1,
        default_root_dir=folder / "run",
        callbacks=[
            *callbacks,
            # At the end of an epoch, so that nothing is broadcast in each step.
            Timer(timedelta(minutes=options.minutes), interval="epoch", verbose=False),
            ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
            Told(folder / "told"),
        ],
        logger=TensorBoardLogger(folder / "run"),
        log_every_n_steps=LOG_EVERY_STEPS,
        val_check_interval=options.epoch_steps // VALIDATIONS_AN_EPOCH,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = make_loader("known", options.epoch_steps, 16, options.ranks)
    # The same on all ranks, and workers that start and end again and again.
    torch.manual_seed(0)
    validation = DataLoader(TensorDataset(torch.rand(320 * options.ranks, WIDTH)), batch_size=16, num_workers=1)
    trainer.fit(SoakModel(options.step_ms / 1e3), training, validation)
    options.result.write_text("{}")


if __name__ == "__main__":
    main()
