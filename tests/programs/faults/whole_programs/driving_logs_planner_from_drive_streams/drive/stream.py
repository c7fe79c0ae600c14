import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset


class Recall:
    """Asks for a file on tape and waits until it is on disk."""

    def __init__(self, path, seconds):
        self.path, self.ready = path, threading.Event()
        threading.Timer(seconds, self.ready.set).start()

    def wait(self, attempts=60, pause=0.5):
        for _ in range(attempts):
            if self.ready.wait(pause):
                return self.path
            time.sleep(pause / 10)
        raise TimeoutError(f"{self.path} was not recalled")


class DriveStream(IterableDataset):
    def __init__(self, root, rank, world, recall_s=14.0):
        self.root, self.rank, self.world, self.recall_s = Path(root), rank, world, recall_s
        self.recalled = set()

    def open(self, path):
        if path.name in (self.root / "ON_TAPE").read_text().split() and path not in self.recalled:
            Recall(path, self.recall_s).wait()
            self.recalled.add(path)
        return np.load(path)

    def __iter__(self):
        for path in sorted(self.root.glob("drive*.npy"))[self.rank :: self.world]:
            drive = torch.from_numpy(self.open(path))
            for k in range(len(drive) - 8):
                yield drive[k : k + 8].flatten(), drive[k + 8, :2]
