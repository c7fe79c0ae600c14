import torch
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 3000


class Pairs(Dataset):
    """Queries that share some words with their passage. Some passages have several queries, some none yet."""

    def __init__(self, count=1800, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.passages = torch.randint(1, VOCABULARY, (count, 30), generator=g)
        self.queries = []
        for passage in self.passages:
            number = int(torch.randint(0, 4, (), generator=g))
            picks = torch.randint(30, (number, 6), generator=g)
            self.queries.append(passage[picks])
        self.negatives: torch.Tensor | None = None

    def __len__(self):
        return len(self.passages)

    def __getitem__(self, index):
        hard = self.passages[self.negatives[index]] if self.negatives is not None else self.passages[index - 1]
        return self.queries[index], self.passages[index], hard


def collate(samples):
    queries, passages, hard = zip(*samples, strict=True)
    owner = torch.cat([torch.full((len(q),), i) for i, q in enumerate(queries)])
    return torch.cat(queries), owner, torch.stack(passages), torch.stack(hard)


def loader(data, batch_size=16, shuffle=False):
    return DataLoader(data, batch_size, shuffle=shuffle, collate_fn=collate, drop_last=False)
