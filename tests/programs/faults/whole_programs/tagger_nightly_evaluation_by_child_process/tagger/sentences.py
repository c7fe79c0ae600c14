import torch
from torch.utils.data import Dataset


class Sentences(Dataset):
    """Synthetic tagging: the tag of a word depends on the word and its left neighbour."""

    def __init__(self, size=800, length=16, words=60, tags=5, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, words, (size, length), generator=g)
        left = torch.roll(self.ids, 1, 1)
        left[:, 0] = 0
        self.tags = (self.ids % tags + left % 2) % tags

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], self.tags[index]
