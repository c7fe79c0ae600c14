import json
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from .logs import write_logs


class HostLogs(Dataset):
    def __init__(self, folder, rank, world_size, window=12):
        files = sorted(Path(folder).glob("host*.jsonl"))[rank::world_size]
        self.rows = [json.loads(line) for f in files for line in f.read_text().splitlines()]
        self.window = window

    def __len__(self):
        return len(self.rows) // self.window

    def __getitem__(self, i):
        return self.rows[i * self.window : (i + 1) * self.window]


class LogData(L.LightningDataModule):
    def __init__(self, folder="logs_in", batch_size=4):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self):
        if not Path(self.folder).exists():
            write_logs(self.folder)

    def train_dataloader(self):
        logs = HostLogs(self.folder, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(logs, self.batch_size, shuffle=True, collate_fn=list, drop_last=True)
