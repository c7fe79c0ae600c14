"""Addition problems of growing length, as token sequences, packed into batches of a fixed number of tokens."""

import random

import torch
from torch.utils.data import Dataset, Sampler

CHARS = "0123456789+= "
STOI = {c: i for i, c in enumerate(CHARS)}


def problem(rng, digits):
    a, b = rng.randrange(10**digits), rng.randrange(10**digits)
    return f"{a}+{b}={a + b} "


class Problems(Dataset):
    def __init__(self, size, max_digits, seed):
        rng = random.Random(seed)
        self.digits = [1 + i % max_digits for i in range(size)]
        self.texts = [problem(rng, d) for d in self.digits]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return torch.tensor([STOI[c] for c in self.texts[i]])


def pad(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=STOI[" "])


class TokenBudgetSampler(Sampler):
    """Batches of at most `max_tokens` tokens, of the problems that the curriculum allows, dealt out to the ranks."""

    def __init__(self, dataset, max_tokens, rank, world_size, seed=0):
        self.dataset, self.max_tokens = dataset, max_tokens
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch, self.level = 0, 1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _batches(self):
        allowed = [i for i, d in enumerate(self.dataset.digits) if d <= self.level]
        random.Random(self.seed + self.epoch).shuffle(allowed)
        batches, current, longest = [], [], 0
        for i in allowed:
            longest = max(longest, len(self.dataset.texts[i]))
            if current and longest * (len(current) + 1) > self.max_tokens:
                batches.append(current)
                current, longest = [], len(self.dataset.texts[i])
            current.append(i)
        batches.append(current)
        usable = len(batches) // self.world_size * self.world_size
        return batches[self.rank : usable : self.world_size]

    def __iter__(self):
        yield from self._batches()

    def __len__(self):
        return len(self._batches())
