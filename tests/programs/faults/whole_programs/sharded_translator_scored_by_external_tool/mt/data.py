import torch
from torch.utils.data import Dataset

VOCAB, EOS = 40, 0


class Reversal(Dataset):
    """Source and its 'translation': reversed and shifted."""

    def __init__(self, n, length=10, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.src = torch.randint(1, VOCAB, (n, length), generator=g)
        self.tgt = self.src.flip(1) % (VOCAB - 1) + 1

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        return self.src[i], self.tgt[i]
