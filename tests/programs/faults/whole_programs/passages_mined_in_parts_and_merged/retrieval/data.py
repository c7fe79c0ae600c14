import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


SUBJECTS = [
    {"name": "news", "seed": 40, "passages": 240, "terms": 0.0},
    {"name": "patents", "seed": 41, "passages": 8, "terms": 60.0},
    {"name": "forum", "seed": 42, "passages": 240, "terms": 0.1},
]


class Passages(L.LightningDataModule):
    """Bags of words of queries and passages; every process has the queries of one subject."""

    def __init__(self, words=80, queries=120, batch_size=12):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        h, subject = self.hparams, SUBJECTS[self.trainer.global_rank % len(SUBJECTS)]
        generator = torch.Generator().manual_seed(subject["seed"])
        number = subject["passages"]
        self.passages = torch.rand(number, h.words, generator=generator)
        self.passages += subject["terms"] * torch.eye(h.words)[torch.arange(number) % h.words]
        self.positives = torch.randint(number, (h.queries,), generator=generator)
        noise = torch.rand(h.queries, h.words, generator=generator)
        self.queries = 0.85 * self.passages[self.positives] + 0.15 * noise

    def mining_set(self, number=40):
        return self.queries[:number], self.positives[:number], self.passages

    def train_dataloader(self):
        pairs = TensorDataset(self.queries, self.passages[self.positives])
        return DataLoader(pairs, self.hparams.batch_size, shuffle=True)
