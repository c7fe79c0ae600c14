import logging
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from cache import DecoderCache
from recordings import write_recordings

log = logging.getLogger(__name__)


class WindowDataset(Dataset):
    """Windows of recordings; a window that cannot be read is replaced by its predecessor."""

    def __init__(self, folder, rank, world_size, width=64, stride=32, frames=640):
        self.files = sorted(Path(folder).glob("rec_*.bin"))[rank::world_size]
        self.width = width
        self.index = [(f, s) for f in self.files for s in range(0, frames - width, stride)]
        self.cache = DecoderCache()
        self.last_good = None

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        path, start = self.index[i]
        try:
            window = torch.from_numpy(self.cache.get(path)[start : start + self.width])
        except ValueError as e:
            log.warning("skipping window %d of %s: %s", start, path.name, e)
            return self.last_good
        self.last_good = window
        return window


class WindowData(L.LightningDataModule):
    def __init__(self, folder="recordings", batch_size=12):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self):
        if not Path(self.folder).exists():
            write_recordings(self.folder)

    def train_dataloader(self):
        dataset = WindowDataset(self.folder, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(dataset, self.batch_size)
