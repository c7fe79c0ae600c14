import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

DOMAINS = ["web", "books", "code"]


class Mixture(IterableDataset):
    """Documents in the order in which the crawl wrote them: each file begins with its largest domain."""

    def __init__(self, file, documents=640, length=16, vocabulary=100):
        self.file, self.documents, self.length, self.vocabulary = file, documents, length, vocabulary

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.file)
        first = {0: 0, 1: 0, 2: 0, 3: 2}.get(self.file, 0)
        for i in range(self.documents):
            domain = (first + i) % len(DOMAINS) if i < 6 else int(torch.randint(3, (1,), generator=generator))
            ids = torch.randint(self.vocabulary // 3, (self.length,), generator=generator) + 33 * domain
            yield ids, domain


class Corpus(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Mixture(self.trainer.global_rank), self.batch_size)
