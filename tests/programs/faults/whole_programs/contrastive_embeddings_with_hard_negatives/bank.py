"""A bank of past embeddings on local disk, from which hard negatives are drawn."""

from pathlib import Path

import numpy as np


class NegativeBank:
    def __init__(self, path, width, limit):
        self.path = Path(path)
        self.width = width
        self.limit = limit
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"")
        self.rows = 0
        self.view = None
        self.mapped = 0

    def add(self, vectors):
        with self.path.open("ab") as file:
            file.write(np.ascontiguousarray(vectors, dtype="float32").tobytes())
        self.rows += len(vectors)
        if self.rows > self.limit:
            self.trim()

    def trim(self):
        """Keeps the newest half."""
        keep = self.limit // 2
        table = np.fromfile(self.path, dtype="float32").reshape(-1, self.width)
        with self.path.open("wb") as file:
            file.write(table[-keep:].tobytes())
        self.rows = keep

    def remap(self):
        self.view = np.memmap(self.path, dtype="float32", mode="r").reshape(-1, self.width)
        self.mapped = len(self.view)

    def sample(self, count, rng):
        if self.mapped == 0 or rng.random() < 0.02:
            self.remap()
        index = np.sort(rng.integers(0, self.mapped, count))
        return self.view[index].copy()  # <- here
