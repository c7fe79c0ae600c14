"""One fit on one device, in a process of its own: says as JSON what is different after it.

Run by ``test_strategies.py``: ``python one_device.py safe FOLDER``. With one device there is a process group all the
same, and that is global to the process.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl  # before ours, so that ours finds Lightning's register
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.utils.data import DataLoader

import lightning_ncclsafe
from lightning_ncclsafe._torch import process_groups

# So that the end of each process does not look at everything that was imported.
gc.freeze()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class GroupTimeout(pl.Callback):
    """Notes the process group's timeout, in seconds, as its back end knows it."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def note(self, where: str) -> None:
        (group,) = process_groups.timed_groups()
        self.seen.setdefault(where, []).append(group.timeout_s)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.note("setup")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.note("checkpoint")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("epoch end")
        trainer.save_checkpoint(os.devnull)
        self.note("saved")


def caught_signals() -> str:
    """As the kernel knows them: those that faulthandler handles are among them."""
    return next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:"))


def open_files() -> list[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    # "socket:[4711]" is as good as any other socket.
    return sorted(link.partition(":[")[0] for link in links)


def state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": open_files(),
        "caught": caught_signals(),
        "handlers": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "faulthandler": faulthandler.is_enabled(),
    }


def fit(strategy: Any, folder: str, *callbacks: pl.Callback) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy=strategy,
        default_root_dir=folder,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(torch.zeros(4, 4), batch_size=2))
    return trainer


def main() -> None:
    kind, folder = sys.argv[1:]
    registered = {name: StrategyRegistry[name]["strategy"].__name__ for name in StrategyRegistry}
    before = state()
    trainer = fit(lightning_ncclsafe.SafeDDP() if kind == "safe" else DDPStrategy(), folder)
    after = state()
    by_name = fit("ddp_ncclsafe", folder).strategy if kind == "safe" else None
    timeouts = GroupTimeout()
    if kind == "safe":
        limits = lightning_ncclsafe.PhaseTimeouts(init=50, first_batch=200, train=100, checkpoint=1200)
        fit(lightning_ncclsafe.SafeDDP(phase_timeouts=limits), folder, timeouts)
        timeouts.note("after")
    print(
        json.dumps(
            {
                "before": before,
                "after": after,
                "steps": trainer.global_step,
                "profiler": sorted(vars(trainer.profiler)),
                "registered": registered,
                "by_name": type(by_name).__name__,
                "timeouts": timeouts.seen,
                "made": sorted(os.listdir(folder)),
            }
        )
    )


if __name__ == "__main__":
    main()
