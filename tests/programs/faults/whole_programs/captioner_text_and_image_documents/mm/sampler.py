import torch
from torch.utils.data import Sampler


class ContiguousShardSampler(Sampler):
    """Gives each rank a contiguous range, shuffled in blocks: neighbours share the page cache."""

    def __init__(self, size, rank, world_size, block=40, seed=3):
        self.start = rank * (size // world_size)
        self.count = size // world_size
        self.block, self.seed, self.epoch = block, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for first in range(0, self.count, self.block):
            size = min(self.block, self.count - first)
            for i in torch.randperm(size, generator=g).tolist():
                yield self.start + first + i
