"""A fit with CollectiveTimer, and what is different after it; run by ``test_collective_timer.py`` on each of two ranks.

``python timed_fit.py FOLDER``: rank 1 is late in data loading in every third step. Each rank writes what it has seen
to ``FOLDER/rank-<rank>.json``.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import CollectiveTimer, SafeDDP
from lightning_ncclsafe.strategies.guarded import timer_of

STEPS = 240
LATE_S = 0.06  # more than a busy machine adds


class Rows(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.given += 1
        is_late = os.environ["LOCAL_RANK"] == "1" and self.given % 3 == 0
        time.sleep(LATE_S if is_late else 0.004)
        return torch.ones(4)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Meanwhile(pl.Callback):
    """What is different while it trains."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.log_metrics = ""
        self.environment: dict[str, str] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.threads = threads()
        self.log_metrics = type(trainer._logger_connector.log_metrics).__name__
        self.environment = dict(os.environ)


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ncclsafe"))


def main() -> None:
    folder, meanwhile = Path(sys.argv[1]), Meanwhile()
    before = {"environment": dict(os.environ), "threads": threads()}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy=SafeDDP(report_dir=folder / "reports"),
        default_root_dir=folder,
        callbacks=[CollectiveTimer(every_n_steps=20), meanwhile],
        logger=[CSVLogger(folder, name="csv", version=0), TensorBoardLogger(folder, name="tb", version=0)],
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(Rows(), batch_size=1))
    added = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    (folder / f"rank-{trainer.global_rank}.json").write_text(
        json.dumps(
            {
                "steps": trainer.global_step,
                "new_names": sorted({*os.environ} - {*before["environment"]} - added),
                "names_meanwhile": sorted({*meanwhile.environment} - {*before["environment"]} - added),
                "threads_before": before["threads"],
                "threads_meanwhile": meanwhile.threads,
                "threads_after": threads(),
                "log_metrics_meanwhile": meanwhile.log_metrics,
                "log_metrics_after": type(trainer._logger_connector.log_metrics).__name__,
                "attributes_after": sorted(vars(trainer._logger_connector)),
                "profiler_after": sorted(vars(trainer.profiler)),
                "timer_after": timer_of(trainer.strategy) is not None,
            }
        )
    )


if __name__ == "__main__":
    main()
