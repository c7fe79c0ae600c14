import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Interviews(Dataset):
    """Turns of a speaker; interviews are long, calls are short."""

    def __init__(self, kind, number, seed):
        self.kind, self.number, self.seed = kind, number, seed
        self.length = {"calls": 60, "interviews": 600, "meetings": 90}[kind]

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(self.seed * 100003 + i)
        frames = torch.randn(self.length, 20, generator=generator)
        return frames, (frames[:, :4].sum(-1) > 0).long()


class Corpus(L.LightningDataModule):
    kinds = ("calls", "interviews", "meetings")

    def __init__(self, turns: int = 1200, batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        rank = self.trainer.global_rank
        kind = self.kinds[rank % len(self.kinds)]
        self.train = Interviews(kind, self.hparams.turns, rank)
        self.validation = Interviews(kind, 40, 50 + rank)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, self.hparams.batch_size)
