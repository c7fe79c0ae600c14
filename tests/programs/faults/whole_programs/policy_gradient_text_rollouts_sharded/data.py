import torch
from torch.utils.data import Dataset


class Prompts(Dataset):
    def __init__(self, size=4000, length=6):
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(2, 24, (size, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]
