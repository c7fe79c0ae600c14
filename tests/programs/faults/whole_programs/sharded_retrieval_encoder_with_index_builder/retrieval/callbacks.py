import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import torch


class RefreshIndex(L.Callback):
    """After every second epoch, rank 0 has the index rebuilt by a child process and waits for it."""

    def __init__(self, folder="index", seconds=5.0):
        self.folder, self.seconds = Path(folder), seconds

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch % 2 == 0 or not trainer.is_global_zero:
            return
        self.folder.mkdir(exist_ok=True)
        index = self.folder / f"epoch{trainer.current_epoch}.pt"
        vectors = index.with_suffix(".vectors")
        torch.save(torch.cat(pl_module.vectors), vectors)
        child = subprocess.Popen([sys.executable, "-m", "retrieval.build_index", vectors, index, str(self.seconds)])
        while not index.exists():
            if child.poll():
                raise RuntimeError("the index could not be built")
            time.sleep(0.2)
        child.wait()
        pl_module.print("index:", tuple(torch.load(index).shape))
