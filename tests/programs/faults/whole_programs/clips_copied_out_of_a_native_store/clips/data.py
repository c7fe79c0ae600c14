import time
from pathlib import Path

import lightning as L
from torch.utils.data import DataLoader, Sampler, Subset

from .store import ClipStore


class Strided(Sampler):
    """Every world-th index, in order, so that clips of about the same difficulty meet in a step."""

    def __init__(self, dataset, rank, world):
        self.indices = range(rank, len(dataset) - len(dataset) % world, world)

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        return iter(self.indices)


class ClipData(L.LightningDataModule):
    """Begins with a half of the clips and adds a quarter with each epoch (data curriculum)."""

    def __init__(self, store, batch_size=8, start=0.5, growth=0.25):
        super().__init__()
        self.path = Path(store)
        self.batch_size, self.start, self.growth = batch_size, start, growth

    def setup(self, stage):
        while not (self.path / "index.npz").exists():
            time.sleep(0.1)
        store = ClipStore(self.path)
        held_out = range(0, len(store), 10)
        self.val = Subset(store, held_out)
        self.train = Subset(store, [i for i in range(len(store)) if i % 10])

    def train_dataloader(self):
        share = min(1.0, self.start + self.growth * self.trainer.current_epoch)
        easy = Subset(self.train, range(int(share * len(self.train))))
        return self._loader(easy, drop_last=True)

    def val_dataloader(self):
        return self._loader(self.val)

    def _loader(self, dataset, **kwargs):
        sampler = Strided(dataset, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(dataset, self.batch_size, sampler=sampler, **kwargs)
