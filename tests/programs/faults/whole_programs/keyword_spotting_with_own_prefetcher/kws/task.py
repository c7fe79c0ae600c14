from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from kws.archive import make_archives
from kws.prefetch import Prefetcher


class Batches(IterableDataset):
    def __init__(self, prefetcher, steps):
        self.prefetcher = prefetcher
        self.steps = steps

    def __iter__(self):
        for _ in range(self.steps):
            features, labels = next(self.prefetcher)
            yield torch.from_numpy(features), torch.from_numpy(labels)


class Keywords(L.LightningDataModule):
    def __init__(self, root="archives", batch_size=16, steps=100, count=4000):
        super().__init__()
        self.save_hyperparameters()
        self.prefetcher = None

    def prepare_data(self):
        make_archives(self.hparams.root, self.trainer.world_size, self.hparams.count)

    def setup(self, stage):
        path = Path(self.hparams.root) / f"part-{self.trainer.global_rank:03d}.ark"
        self.prefetcher = Prefetcher(path, self.hparams.batch_size)

    def train_dataloader(self):
        return DataLoader(Batches(self.prefetcher, self.hparams.steps), batch_size=None)

    def teardown(self, stage):
        self.prefetcher.close()


class Spotter(L.LightningModule):
    def __init__(self, hidden=96):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(40, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 8)
        )

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.net(features), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
