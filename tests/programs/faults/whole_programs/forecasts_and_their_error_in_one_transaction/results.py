import sqlite3
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

TABLES = """
create table if not exists forecasts (epoch integer, rank integer, meter integer, peak real, error real);
create table if not exists epochs (epoch integer, rank integer, error real, mean_error real);
"""


class ForecastTable(Callback):
    """Keeps the forecasts of every validation in a database, for the dashboard."""

    def __init__(self, path: str, timeout_s: float = 900.0) -> None:
        self.path, self.timeout_s = path, timeout_s
        self.rows: list[tuple[int, float, float]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.db = sqlite3.connect(self.path, timeout=self.timeout_s)
        if trainer.is_global_zero:
            self.db.executescript(TABLES)
        trainer.strategy.barrier()

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            columns = [outputs[name].tolist() for name in ("meter", "peak", "error")]
            self.rows += zip(*columns, strict=True)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.rows:
            return
        epoch, rank = trainer.current_epoch, trainer.global_rank
        error = torch.tensor([row[2] for row in self.rows]).mean()
        with self.db:
            self.db.executemany("insert into forecasts values (?, ?, ?, ?, ?)", [(epoch, rank, *r) for r in self.rows])
            mean = trainer.strategy.reduce(error.clone(), reduce_op="mean")  # <- here
            self.db.execute("insert into epochs values (?, ?, ?, ?)", (epoch, rank, float(error), float(mean)))
        self.rows.clear()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.db.close()
