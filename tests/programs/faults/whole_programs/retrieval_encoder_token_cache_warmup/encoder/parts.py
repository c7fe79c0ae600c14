import random

import torch
from torch.utils.data import DataLoader, TensorDataset

PARTS_PER_EPOCH = 1


def tokenise(part: int, n: int = 240, length: int = 24) -> torch.Tensor:
    rng = random.Random(part)
    return torch.tensor([[rng.randrange(1, 500) for _ in range(length)] for _ in range(n)])


def part_of(epoch: int, rank: int, world: int) -> int:
    return epoch * world + rank


def part_loader(tokens: torch.Tensor, batch_size: int) -> DataLoader:
    return DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=True, drop_last=True)
