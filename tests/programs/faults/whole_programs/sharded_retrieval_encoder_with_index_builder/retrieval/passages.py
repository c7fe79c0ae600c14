import time
from pathlib import Path

import torch
from torch.utils.data import Dataset


class Passages(Dataset):
    """Tokenised on first use and cached on disk; long passages take longer, so the first epoch is slow."""

    def __init__(self, cache: Path, size: int):
        self.cache, self.size = cache, size
        cache.mkdir(parents=True, exist_ok=True)

    def __len__(self):
        return self.size

    def tokenise(self, index):
        g = torch.Generator().manual_seed(index)
        length = int(torch.randint(8, 32, (), generator=g))
        time.sleep(length / 400)
        ids = torch.randint(1, 300, (length,), generator=g)
        return torch.nn.functional.pad(ids, (0, 32 - length))

    def __getitem__(self, index):
        target = self.cache / f"{index:05d}.pt"
        if target.exists():
            return torch.load(target)
        ids = self.tokenise(index)
        torch.save(ids, target)
        return ids
