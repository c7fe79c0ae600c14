from dataclasses import dataclass

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


@dataclass
class Graph:
    x: torch.Tensor
    pos: torch.Tensor
    edges: torch.Tensor
    y: torch.Tensor


# a virus capsid came with the last release of the data
LARGE = {141: 6_000_000}


class Molecules(Dataset):
    def __init__(self, start, n):
        self.start, self.n = start, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        i += self.start
        g = torch.Generator().manual_seed(i)
        atoms = LARGE.get(i, 12 + i % 20)
        pos = torch.rand(atoms, 3, generator=g) * atoms ** (1 / 3)
        src = torch.arange(atoms - 1)
        edges = torch.stack([torch.cat([src, src + 1]), torch.cat([src + 1, src])])
        x = torch.randint(0, 8, (atoms,), generator=g)
        return Graph(x, pos, edges, x.float().mean() + pos.std())


class GraphData(L.LightningDataModule):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def setup(self, stage=None):
        self.train, self.val = Molecules(0, self.n), Molecules(self.n, self.n // 10)

    # one molecule a batch, sorted by its identifier
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=None, sampler=self.sampler(self.train))

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=None, sampler=self.sampler(self.val))

    def sampler(self, data):
        return torch.utils.data.DistributedSampler(
            data, self.trainer.world_size, self.trainer.global_rank, shuffle=False
        )
