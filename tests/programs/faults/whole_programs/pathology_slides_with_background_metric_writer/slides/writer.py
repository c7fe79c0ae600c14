import json
import queue
import threading
from pathlib import Path

from lightning.pytorch.callbacks import Callback


class SlideLossWriter(Callback):
    """Writes the loss of every slide without holding up the training."""

    def __init__(self, folder="slide_losses"):
        self.folder = Path(folder)
        self.rows = queue.Queue()
        self.thread = None

    def setup(self, trainer, pl_module, stage):
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"rank{trainer.global_rank}.jsonl"
        self.thread = threading.Thread(target=self.drain, args=(path,), name="slide-losses")
        self.thread.start()

    def drain(self, path):
        with path.open("a") as f:
            while (row := self.rows.get()) is not None:
                f.write(json.dumps(row) + "\n")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for slide, loss in zip(batch["slide"], outputs["per_slide"].tolist()):
            self.rows.put({"slide": slide, "loss": round(loss, 4), "step": trainer.global_step})

    def teardown(self, trainer, pl_module, stage):
        self.rows.put(None)
        self.thread.join()
