import contextlib
import fcntl
import multiprocessing
import time
from pathlib import Path

import torch


class DiskBank:
    """Embeddings of earlier batches, in small files per shard. Old ones are merged by a housekeeper."""

    def __init__(self, folder: Path, merge_above: int = 40, keep: int = 24):
        self.folder = folder
        self.merge_above, self.keep = merge_above, keep
        self.housekeeper = None
        self.count = 0
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self):
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # <- here
            yield

    def files(self):
        return sorted(self.folder.glob("part*.pt"))

    def add(self, embeddings):
        with self.locked():
            torch.save(embeddings, self.folder / f"part{self.count:06d}.pt")
            self.count += 1
            if self.housekeeper is None and len(self.files()) > self.merge_above:
                context = multiprocessing.get_context("fork")
                self.housekeeper = context.Process(target=self.tidy, args=(15.0,), daemon=True)
                self.housekeeper.start()

    def sample(self, size):
        with self.locked():
            recent = [torch.load(path) for path in self.files()[-4:]]
        rows = torch.cat(recent)
        return rows[torch.randperm(len(rows))[:size]]

    def tidy(self, seconds):
        while True:
            time.sleep(seconds)
            for path in self.files()[: -self.keep]:
                path.unlink()
