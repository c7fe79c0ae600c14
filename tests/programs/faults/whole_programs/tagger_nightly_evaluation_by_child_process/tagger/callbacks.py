import json
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only


class ChildEvaluation(L.Callback):
    """Scores the weights in a child process, which keeps its memory out of the training's."""

    def __init__(self, folder="results"):
        self.folder = Path(folder)

    @rank_zero_only
    def setup(self, trainer, pl_module, stage):
        self.folder.mkdir(exist_ok=True)

    @rank_zero_only
    def on_train_epoch_end(self, trainer, pl_module):
        weights = self.folder / f"epoch{trainer.current_epoch}.pt"
        result = weights.with_suffix(".json")
        torch.save(pl_module.network.state_dict(), weights)
        subprocess.Popen([sys.executable, "-m", "tagger.evaluate", str(weights), str(result)])
        while not result.exists():  # <- here
            time.sleep(0.2)
        time.sleep(0.1)
        score = json.loads(result.read_text())
        trainer.logger.log_metrics({"test/accuracy": score["accuracy"]}, step=trainer.global_step)
