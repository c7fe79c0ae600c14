from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only


@dataclass
class Run:
    """One run of the tracker: a folder with a file of JSON lines."""

    folder: Path
    project: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    file: TextIO | None = None

    def start(self) -> Run:
        path = self.folder / self.project / self.id
        path.mkdir(parents=True)
        self.file = (path / "events.jsonl").open("a", buffering=1)
        return self

    def track(self, **values: Any) -> None:
        assert self.file is not None
        self.file.write(json.dumps({"time": time.time(), **values}) + "\n")


class Tracking(Callback):
    """Sends metrics to our tracker, and lets a continued training continue its run."""

    def __init__(self, folder: str, project: str, every_n_steps: int = 10) -> None:
        self.folder = Path(folder)
        self.project = project
        self.every_n_steps = every_n_steps
        self.run: Run | None = None
        self.resumed_id: str | None = None

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = Run(self.folder, self.project)
        if self.resumed_id:
            run.id = self.resumed_id
        self.run = run.start()

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every_n_steps == 0:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.run.track(step=trainer.global_step, **metrics)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["tracking"] = {"project": self.project, "run": self.run.id}  # <- here

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.resumed_id = checkpoint.get("tracking", {}).get("run")

    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run.track(step=trainer.global_step, finished=True)
