import random
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lmkit.segmenter import Segmenter

LATIN = "the model reads a line of text and predicts what follows it in time".split()
GREEK = "το μοντέλο διαβάζει μια γραμμή κειμένου και προβλέπει τη συνέχεια".split()


def write_corpus(root: Path, languages, lines=6000):
    root.mkdir(parents=True, exist_ok=True)
    for index, language in enumerate(languages):
        path = root / f"{index:02d}.{language}.txt"
        if path.exists():
            continue
        rng = random.Random(index)
        words = LATIN if language == "en" else LATIN + GREEK
        text = "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(lines))
        scratch = path.with_suffix(".tmp")
        scratch.write_text(text, encoding="utf-8")
        scratch.rename(path)


class Lines(Dataset):
    def __init__(self, path, length=48):
        self.lines = path.read_text(encoding="utf-8").splitlines()
        self.length = length
        self.segment = Segmenter()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        ids = self.segment(self.lines[index])[: self.length + 1]
        ids += [0] * (self.length + 1 - len(ids))
        return torch.tensor(ids)


class TextData(L.LightningDataModule):
    def __init__(self, root: str = "corpus", batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        write_corpus(Path(self.hparams.root), ["en", "el", "en"])

    def setup(self, stage):
        files = sorted(Path(self.hparams.root).glob("*.txt"))
        self.train = Lines(files[self.trainer.global_rank % len(files)])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def teardown(self, stage):
        self.train.segment.close()
