import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Utterances(Dataset):
    """Filterbank frames of utterances, generated from one prototype per speaker."""

    def __init__(self, n: int, speakers: int, frames: int):
        g = torch.Generator().manual_seed(speakers)
        self.prototypes = torch.randn(speakers, 40, generator=g)
        self.n, self.speakers, self.frames = n, speakers, frames

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        speaker = i % self.speakers
        return self.prototypes[speaker][:, None] + torch.randn(40, self.frames), speaker


class SpeakerData(L.LightningDataModule):
    def __init__(self, n: int = 4000, speakers: int = 50, frames: int = 100, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        h = self.hparams
        self.train = Utterances(h.n, h.speakers, h.frames)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)
