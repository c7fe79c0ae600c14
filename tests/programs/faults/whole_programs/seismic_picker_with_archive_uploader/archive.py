import queue
import shutil
import threading
import time
from pathlib import Path

import lightning as L


class ArchiveUploader(L.Callback):
    """Copies every new checkpoint to the archive from a background thread, so that training does not wait for it."""

    def __init__(self, archive="archive", chunk=65536, pause=0.02):
        self.archive, self.chunk, self.pause = Path(archive), chunk, pause
        self.queue = queue.Queue()
        self.sent = set()

    def on_fit_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.archive.mkdir(parents=True, exist_ok=True)
            threading.Thread(target=self._work, name="archive", daemon=True).start()

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.is_global_zero and trainer.checkpoint_callback.best_model_path:
            self._offer(trainer.checkpoint_callback.best_model_path)

    def _offer(self, path):
        if path not in self.sent:
            self.sent.add(path)
            self.queue.put(Path(path))

    def _work(self):
        while True:
            path = self.queue.get()
            with open(path, "rb") as src, open(self.archive / path.name, "wb") as dst:
                while block := src.read(self.chunk):
                    dst.write(block)
                    time.sleep(self.pause)
            shutil.copystat(path, self.archive / path.name)
            self.queue.task_done()

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            self._offer(trainer.checkpoint_callback.best_model_path)
            self.queue.join()  # <- here
            print(f"{len(self.sent)} checkpoints archived")
