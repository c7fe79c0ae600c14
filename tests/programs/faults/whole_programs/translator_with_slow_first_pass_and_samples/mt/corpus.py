import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Tokenized(Dataset):
    """Tokenises a pair when it is first read, and keeps it as a file; later epochs read the file."""

    def __init__(self, folder, pairs, vocabulary=120):
        self.folder, self.pairs, self.vocabulary = Path(folder), pairs, vocabulary
        self.folder.mkdir(parents=True, exist_ok=True)

    def __len__(self):
        return self.pairs

    def tokenize(self, i):
        time.sleep(0.06 + 0.002 * (i % 40))
        generator = torch.Generator().manual_seed(i)
        source = torch.randint(3, self.vocabulary, (14,), generator=generator)
        return source, source.flip(0)

    def __getitem__(self, i):
        file = self.folder / f"{i:05d}.pt"
        if not file.exists():
            pair = self.tokenize(i)
            temporary = file.with_suffix(f".{torch.initial_seed() % 99991}.tmp")
            torch.save(pair, temporary)
            temporary.rename(file)
        return torch.load(file)


class Pairs(L.LightningDataModule):
    def __init__(self, folder, pairs=480, batch_size=8):
        super().__init__()
        self.folder, self.number, self.batch_size = folder, pairs, batch_size

    def setup(self, stage):
        self.data = Tokenized(self.folder, self.number)

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(torch.utils.data.Subset(self.data, range(0, self.number, 10)), self.batch_size)
