"""A corpus of sentences, a tokenizer of bytes, and a file of packed tokens."""

import random
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

SUBJECTS = ["the cat", "a dog", "my neighbour", "the old captain", "every child", "nobody"]
VERBS = ["sees", "carries", "remembers", "paints", "follows", "sells"]
OBJECTS = ["the sea", "a small boat", "two lemons", "the long road", "an open window", "its shadow"]


def sentences(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        yield f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."


def tokenize(text):
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)


def pack(path: Path, count: int, max_words: int, seed: int) -> int:
    """Sentences up to a length, as one stream of tokens; `max_words` grows with the curriculum."""
    total = 0
    with path.open("wb") as file:  # <- here
        for sentence in sentences(count, seed):
            if len(sentence.split()) <= max_words:
                tokens = tokenize(sentence + "\n")
                file.write(tokens.tobytes())
                total += len(tokens)
    return total


class PackedTokens(Dataset):
    def __init__(self, path: Path, block: int):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.block = block

    def __len__(self):
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, index):
        start = index * self.block
        return torch.from_numpy(self.tokens[start : start + self.block + 1].astype(np.int64))


class RandomBlocks(Sampler):
    """Blocks at random, equally many on each rank and in each epoch."""

    def __init__(self, data, count, rank):
        self.data, self.count, self.rank, self.epoch = data, count, rank, 0

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = np.random.default_rng([self.epoch, self.rank])
        yield from rng.integers(len(self.data), size=self.count).tolist()


def train_loader(path, block, batch_size, batches, rank, workers):
    data = PackedTokens(path, block)
    sampler = RandomBlocks(data, batches * batch_size, rank)
    return DataLoader(data, batch_size, sampler=sampler, num_workers=workers)
