from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from .cleaning import normalise
from .export import export_boxes

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,()"


class Lines(Dataset):
    def __init__(self, folder: Path):
        self.rows = (folder / "lines.txt").read_text().splitlines()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        label = normalise(self.rows[index])
        target = torch.tensor([ALPHABET.index(c) + 1 for c in label])
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(16, 8 * len(target), generator=generator) + target.repeat_interleave(8) / 10
        return image, target


def collate(batch):
    images, targets = zip(*batch)
    width = max(i.shape[1] for i in images)
    images = torch.stack([torch.nn.functional.pad(i, (0, width - i.shape[1])) for i in images])
    lengths = torch.tensor([len(t) for t in targets])
    return images, torch.cat(targets), lengths


class Boxes(L.LightningDataModule):
    """Each rank reads the boxes that the archive assigned to it."""

    def __init__(self, root: str = "boxes", batch_size: int = 6):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        export_boxes(Path(self.hparams.root), self.trainer.world_size)

    def train_dataloader(self):
        folder = Path(self.hparams.root) / f"box{self.trainer.global_rank:02d}"
        return DataLoader(Lines(folder), batch_size=self.hparams.batch_size, collate_fn=collate)
