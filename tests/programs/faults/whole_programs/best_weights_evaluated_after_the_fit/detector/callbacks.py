import json
import logging
import os
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

log = logging.getLogger(__name__)


class BestModelCallback(Callback):
    """Keeps the best weights, without an optimizer, and evaluates them on the test set when training is over."""

    def __init__(self, output: Path, monitor: str = "val/iou", run_test: bool = False):
        self.output, self.monitor, self.run_test = Path(output), monitor, run_test
        self.best = float("-inf")

    @property
    def path(self) -> Path:
        return self.output / "checkpoint_best.pth"

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking or self.monitor not in trainer.callback_metrics:
            return
        score = trainer.callback_metrics[self.monitor].item()
        if score > self.best:
            self.best = score
            if trainer.is_global_zero:
                self.output.mkdir(parents=True, exist_ok=True)
                torch.save({"model": pl_module.state_dict(), self.monitor: score}, self.path)

    def on_fit_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        results = {self.monitor: self.best}
        if self.run_test:
            best = torch.load(self.path, weights_only=True)
            pl_module.load_state_dict(best["model"])
            log.info("evaluating the best weights (%.3f)", best[self.monitor])
            results.update(trainer.test(pl_module, datamodule=trainer.datamodule, verbose=False)[0])  # <- here
        partial = self.output / "results.json.tmp"
        partial.write_text(json.dumps(results, indent=2))
        os.replace(partial, self.output / "results.json")
