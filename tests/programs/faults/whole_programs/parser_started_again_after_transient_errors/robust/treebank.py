import json
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

TAGS = ["NOUN", "VERB", "ADJ", "ADV", "DET", "ADP", "PRON", "PUNCT"]


def convert(folder, sentences=900, seed=3):
    """Writes one line for every sentence; foreign words keep the tag X of the original treebank."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.jsonl", "w") as file:
        for i in range(sentences):
            words = torch.randint(1, 200, (12,), generator=generator).tolist()
            tags = [TAGS[word % len(TAGS)] for word in words]
            if i == 511:
                tags[4] = "X"
            file.write(json.dumps({"words": words, "tags": tags}) + "\n")


class Sentences(Dataset):
    def __init__(self, path):
        self.lines = Path(path).read_text().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        row = json.loads(self.lines[i])
        return torch.tensor(row["words"]), torch.tensor([TAGS.index(tag) for tag in row["tags"]])


class Treebank(L.LightningDataModule):
    def __init__(self, folder, batch_size=6):
        super().__init__()
        self.folder, self.batch_size = Path(folder), batch_size

    def prepare_data(self):
        if not (self.folder / "train.jsonl").exists():
            convert(self.folder)

    def train_dataloader(self):
        return DataLoader(Sentences(self.folder / "train.jsonl"), self.batch_size)
