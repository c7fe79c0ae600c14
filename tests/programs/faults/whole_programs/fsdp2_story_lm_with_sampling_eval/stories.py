import random

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from tokens import PAD, encode

SUBJECTS = ["the fox", "a small owl", "the old miller", "anna", "the river", "a boat"]
VERBS = ["sees", "wants", "finds", "hides", "follows", "forgets"]
OBJECTS = ["the moon", "bread", "a silver key", "her brother", "the way home", "rain"]


def write_story(rng):
    n = rng.choice([1, 1, 2, 3])
    return ". ".join(f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}" for _ in range(n)) + "."


class StoryDataset(Dataset):
    def __init__(self, size, seed, block=64):
        rng = random.Random(seed)
        self.rows = [self._pad(encode(write_story(rng)), block) for _ in range(size)]

    @staticmethod
    def _pad(ids, block):
        ids = ids[:block]
        return torch.tensor(ids + [PAD] * (block - len(ids)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class StoryData(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.train_set = StoryDataset(480, seed=11)
        self.val_set = StoryDataset(32, seed=12)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=4)
