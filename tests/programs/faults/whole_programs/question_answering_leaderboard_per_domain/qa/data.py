import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

DOMAINS = ("travel", "cooking", "sports")


class PairDataset(Dataset):
    """Question and answer embeddings with a label: does the answer fit?"""

    def __init__(self, n, seed, dim=32):
        g = torch.Generator().manual_seed(seed)
        self.q = torch.randn(n, dim, generator=g)
        self.y = torch.randint(0, 2, (n,), generator=g)
        noise = torch.randn(n, dim, generator=g)
        self.a = torch.where(self.y[:, None] == 1, self.q + 0.7 * noise, noise)
        self.domain = torch.randint(0, len(DOMAINS), (n,), generator=g)

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        return self.q[i], self.a[i], self.y[i], self.domain[i]


class PairData(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, train_size: int = 960, val_size: int = 240):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(PairDataset(self.hparams.train_size, 1), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(PairDataset(self.hparams.val_size, 2), self.hparams.batch_size)
