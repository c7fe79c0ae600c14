import fcntl

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from molnet.store import FeatureStore


class Molecules(Dataset):
    def __init__(self, store, stats=None):
        self.table = store.table()
        self.stats = stats

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        x = torch.tensor(self.table[index])
        if self.stats is not None:
            x = (x - self.stats["mean"]) / self.stats["std"]
        return x, x[:4].sum().tanh()


class MoleculeData(L.LightningDataModule):
    def __init__(self, root="scratch/fingerprints", batch_size=32):
        super().__init__()
        self.store = FeatureStore(root)
        self.batch_size = batch_size
        self.stats = None
        self.scan_loader = None

    def prepare_data(self):
        with self.store.locked(fcntl.LOCK_EX):
            self.store.create()
            self.stats = self.scan()
            self.store.write_stats(**self.stats)

    def scan(self):
        self.scan_loader = DataLoader(Molecules(self.store), batch_size=500, num_workers=1, persistent_workers=True)
        total, squares, count = 0.0, 0.0, 0
        for x, _ in self.scan_loader:
            total += x.sum().item()
            squares += x.square().sum().item()
            count += x.numel()
        mean = total / count
        return {"mean": mean, "std": (squares / count - mean**2) ** 0.5}

    def setup(self, stage):
        if self.stats is None:
            self.stats = self.store.read_stats()
        self.train = Molecules(self.store, self.stats)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def on_exception(self, exception):
        self.scan_loader = None
