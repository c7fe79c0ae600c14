import queue
import threading
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

from .recordings import read


class Stations(IterableDataset):
    """Reads the containers of this rank in a few threads; torch's workers do not pay off for small clips."""

    def __init__(
        self, root: Path, rank: int, world_size: int, threads: int = 2, batch_size: int = 8, batches: int = 25
    ):
        self.files = sorted(root.glob("*.rec"))[rank::world_size]
        self.threads, self.batch_size, self.batches = threads, batch_size, batches

    def produce(self, files, ready):
        for path in files:
            for clip in read(path):
                ready.put(clip)
        ready.put(None)

    def clips(self):
        ready = queue.Queue(maxsize=64)
        for number in range(self.threads):
            part = self.files[number :: self.threads]
            threading.Thread(target=self.produce, args=(part, ready), daemon=True).start()
        running = self.threads
        while running:
            clip = ready.get()  # <- here
            if clip is None:
                running -= 1
            else:
                yield clip

    def __iter__(self):
        rows = []
        produced = 0
        for wave, label in self.clips():
            if produced < self.batches:
                rows.append((torch.from_numpy(wave), label))
            if len(rows) == self.batch_size:
                waves, labels = zip(*rows)
                yield torch.stack(waves), torch.tensor(labels)
                produced += 1
                rows = []
