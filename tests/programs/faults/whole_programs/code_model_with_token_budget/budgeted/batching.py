"""Files of a repository dump, batched by padded size."""

import torch
from torch.utils.data import Dataset, Sampler


class SourceFiles(Dataset):
    def __init__(self, n, vocab, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = (torch.rand(n, generator=g) ** 3 * 110 + 12).long().sort().values
        self.files = [torch.randint(1, vocab, (int(k),), generator=g) for k in lengths]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return self.files[i]


def collate(files):
    return torch.nn.utils.rnn.pad_sequence(files, batch_first=True)


class StridedBlocks(Sampler):
    """Blocks of neighbours in the length-sorted dump, so that a batch needs little padding; rank r takes every r-th."""

    def __init__(self, n, block, rank, world, seed=0):
        self.block, self.rank, self.world, self.seed, self.epoch = block, rank, world, seed, 0
        self.n_blocks = n // block // world * world

    def __len__(self):
        return self.n_blocks // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        order = torch.randperm(self.n_blocks, generator=g).tolist()
        for b in order[self.rank :: self.world]:
            yield list(range(b * self.block, (b + 1) * self.block))
