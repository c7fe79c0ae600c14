import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

VOCAB, PATCHES, PATCH_DIM = 200, 9, 27


class Pages(Dataset):
    """Text, and for most pages a figure. Chapters without figures (pages of formulas) are a few pages long."""

    def __init__(self, first, last, max_text):
        self.numbers = range(first, last)
        self.max_text = max_text

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        number = self.numbers[i]
        gen = torch.Generator().manual_seed(number)
        page = {"tokens": torch.randint(1, VOCAB, (self.max_text,), generator=gen)}
        formulas = number % 277 >= 268
        if not formulas:
            page["figure"] = torch.randn(PATCHES, PATCH_DIM, generator=gen) + page["tokens"][0] / VOCAB
        return page


def collate(pages):
    batch = {"tokens": torch.stack([p["tokens"] for p in pages])}
    figures = [p["figure"] for p in pages if "figure" in p]
    if figures:
        batch["figures"] = default_collate(figures)
        batch["owner"] = torch.tensor([k for k, p in enumerate(pages) if "figure" in p])
    return batch


class DocumentData(L.LightningDataModule):
    def __init__(self, pages=640, batch_size=4, max_text=24):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        hp = self.hparams
        self.train = Pages(0, hp.pages, hp.max_text)
        self.val = Pages(10_000, 10_064, hp.max_text)

    def _loader(self, dataset):
        trainer = self.trainer
        per_rank = len(dataset) // trainer.world_size
        start = trainer.global_rank * per_rank  # whole chapters stay on one rank
        share = torch.utils.data.Subset(dataset, range(start, start + per_rank))
        return DataLoader(share, self.hparams.batch_size, collate_fn=collate)

    def train_dataloader(self):
        return self._loader(self.train)

    def val_dataloader(self):
        return self._loader(self.val)
