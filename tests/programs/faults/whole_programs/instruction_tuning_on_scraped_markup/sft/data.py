import json
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from sft.cleaning import clean
from sft.scrape import dump


class PageDataset(Dataset):
    def __init__(self, path, block=96):
        self.pages = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.block = block

    def __len__(self):
        return len(self.pages)

    def __getitem__(self, i):
        data = clean(self.pages[i]["text"]).encode()[: self.block + 1]
        ids = torch.tensor(list(data.ljust(self.block + 1, b"\n")))
        return ids[:-1], ids[1:]


class PageData(L.LightningDataModule):
    def __init__(self, path: str = "dump/pages.jsonl", batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        dump(self.hparams.path)

    def train_dataloader(self):
        return DataLoader(PageDataset(self.hparams.path), self.hparams.batch_size, shuffle=True)
