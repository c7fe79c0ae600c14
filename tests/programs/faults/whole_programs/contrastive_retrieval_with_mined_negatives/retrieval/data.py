from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class PairDataset(Dataset):
    def __init__(self, queries, passages):
        self.queries, self.passages = queries, passages
        self.negatives = torch.randint(len(passages), (len(queries),))

    def __len__(self):
        return len(self.queries)

    def __getitem__(self, i):
        return self.queries[i], self.passages[i], self.passages[self.negatives[i]]


class RetrievalData(L.LightningDataModule):
    def __init__(self, root: str = "corpus", n_pairs: int = 1024, dim: int = 32, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        path = Path(self.hparams.root) / "pairs.pt"
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        g = torch.Generator().manual_seed(7)
        passages = torch.randn(self.hparams.n_pairs, self.hparams.dim, generator=g)
        queries = passages + 0.3 * torch.randn(passages.shape, generator=g)
        torch.save({"queries": queries, "passages": passages}, path)

    def setup(self, stage):
        pairs = torch.load(Path(self.hparams.root) / "pairs.pt")
        cut = int(0.9 * len(pairs["queries"]))
        self.train_set = PairDataset(pairs["queries"][:cut], pairs["passages"][:cut])
        self.val_set = PairDataset(pairs["queries"][cut:], pairs["passages"][cut:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)
