from pathlib import Path

import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from asr import manifest
from asr.sampling import FrameBudgetSampler


class Utterances(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return torch.randn(row["frames"], 20), torch.randint(1, 30, (row["words"],))


def collate(items):
    frames, words = zip(*items)
    lengths = torch.tensor([len(f) for f in frames]), torch.tensor([len(w) for w in words])
    return pad_sequence(frames, batch_first=True), torch.cat(words), *lengths


class SpeechData(L.LightningDataModule):
    def __init__(self, path="manifest.json", budget=1200, start=70, step=10):
        super().__init__()
        self.save_hyperparameters()
        self.path = Path(path)

    def prepare_data(self):
        manifest.write(self.path)

    def train_dataloader(self):
        rows, h = manifest.read(self.path), self.hparams
        sampler = FrameBudgetSampler([r["frames"] for r in rows], h.budget, h.start, h.step)
        return DataLoader(Utterances(rows), batch_sampler=sampler, collate_fn=collate)
