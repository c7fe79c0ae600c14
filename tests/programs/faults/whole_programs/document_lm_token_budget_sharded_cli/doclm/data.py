import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

SOURCES = {"books": (90, 128), "forum": (12, 60), "wiki": (20, 90), "code": (24, 80)}


class Source(IterableDataset):
    """An endless stream of documents of one source, padded to the block length."""

    def __init__(self, name, block, seed):
        self.low, self.high = SOURCES[name]
        self.block = block
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            size = int(torch.randint(self.low, self.high + 1, (1,), generator=self.generator))
            ids = torch.zeros(self.block + 1, dtype=torch.long)
            ids[:size] = torch.randint(1, 200, (size,), generator=self.generator)
            yield {"ids": ids, "mask": ids[1:] != 0}


class Documents(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, block: int = 128, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        names = list(SOURCES)
        rank = self.trainer.global_rank
        source = Source(names[rank % len(names)], self.hparams.block, self.hparams.seed + rank)
        return DataLoader(source, batch_size=self.hparams.batch_size)
