import queue
import threading
import time
from pathlib import Path

import lightning as L
import torch


class Archive(L.Callback):
    """Compresses and stores the weights of each epoch in a thread, at the pace of the archive."""

    def __init__(self, folder="archive", seconds_per_file=6.0):
        self.folder, self.seconds = Path(folder), seconds_per_file
        self.waiting = queue.Queue()
        self.thread = None

    def store(self):
        while (item := self.waiting.get()) is not None:
            name, state = item
            time.sleep(self.seconds)
            torch.save(state, self.folder / name)
            self.waiting.task_done()
        self.waiting.task_done()

    def on_fit_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            self.thread = threading.Thread(target=self.store, name="archive")
            self.thread.start()

    def on_train_epoch_end(self, trainer, pl_module):
        if self.thread is not None:
            state = {k: v.clone() for k, v in pl_module.state_dict().items()}
            self.waiting.put((f"epoch{trainer.current_epoch}.pt", state))

    def on_fit_end(self, trainer, pl_module):
        if self.thread is not None:
            self.waiting.put(None)
            self.waiting.join()
            self.thread.join()
