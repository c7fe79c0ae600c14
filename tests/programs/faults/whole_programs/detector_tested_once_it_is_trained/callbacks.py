import json
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback


class BestModel(Callback):
    """Keeps the weights with the best overlap, and reports on them when training is over."""

    def __init__(self, folder: Path, run_test: bool = False) -> None:
        self.folder = folder
        self.run_test = run_test
        self.best = float("-inf")

    @property
    def weights(self) -> Path:
        return self.folder / "best.pt"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        score = float(trainer.callback_metrics["val_iou"])
        if score <= self.best:
            return
        self.best = score
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(pl_module.state_dict(), self.weights)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        summary = {"best_val_iou": self.best, "epochs": trainer.current_epoch}
        if self.run_test:
            pl_module.load_state_dict(torch.load(self.weights))
            datamodule = trainer.datamodule
            (scores,) = trainer.test(pl_module, datamodule=datamodule, verbose=False)  # <- here
            summary.update(scores)
        self.report.write_text(json.dumps(summary, indent=2))
