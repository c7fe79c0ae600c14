import json
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class DocumentFolder(Dataset):
    def __init__(self, root, keep):
        files = sorted(Path(root).glob("doc-*.json"))
        self.files = [f for i, f in enumerate(files) if keep(i)]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return json.loads(self.files[i].read_text())


class DocumentData(L.LightningDataModule):
    def __init__(self, root="corpus", batch_size=8):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def prepare_data(self):
        if not Path(self.root).exists():
            subprocess.run([sys.executable, "prepare_corpus.py", self.root], check=True)

    def _loader(self, keep, shuffle):
        return DataLoader(DocumentFolder(self.root, keep), self.batch_size, shuffle=shuffle, collate_fn=list)

    def train_dataloader(self):
        return self._loader(lambda i: i % 10 != 9, False)

    def val_dataloader(self):
        return self._loader(lambda i: i % 10 == 9, False)
