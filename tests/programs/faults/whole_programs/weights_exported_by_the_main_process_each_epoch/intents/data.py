import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

LABELS = ["balance", "transfer", "card_lost", "card_new", "limit", "greeting", "other"]
VOCABULARY = 800


def utterances(count, seed=0):
    """Token 1 to 20 times the number of the intent is typical of it; the rest is filler."""
    g = torch.Generator().manual_seed(seed)
    intent = torch.randint(len(LABELS), (count,), generator=g)
    tokens = torch.randint(200, VOCABULARY, (count, 24), generator=g)
    typical = 1 + intent.unsqueeze(1) * 20 + torch.randint(20, (count, 24), generator=g)
    tokens = torch.where(torch.rand(count, 24, generator=g) < 0.25, typical, tokens)
    lengths = torch.randint(6, 25, (count, 1), generator=g)
    return tokens.masked_fill(torch.arange(24) >= lengths, 0), intent


def loaders(count=1600, batch_size=24):
    train, val = random_split(TensorDataset(*utterances(count)), [0.9, 0.1], torch.Generator().manual_seed(1))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(val, batch_size)
