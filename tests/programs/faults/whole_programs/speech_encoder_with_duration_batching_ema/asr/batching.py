"""Batches of at most a given number of padded seconds."""

import random

import torch
from torch.utils.data import Dataset, Sampler

FRAMES_PER_SECOND, MELS = 10, 16


class Utterances(Dataset):
    def __init__(self, entries):
        self.entries = entries

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, i):
        entry = self.entries[i]
        g = torch.Generator().manual_seed(int(entry["id"][3:]))
        return torch.randn(max(4, int(entry["seconds"] * FRAMES_PER_SECOND)), MELS, generator=g)


def pad(batch):
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)


class DurationBatches(Sampler):
    def __init__(self, entries, rank, world, max_seconds, seed=0):
        order = sorted(range(len(entries)), key=lambda i: entries[i]["id"])
        mine = order[rank::world]  # <- here
        mine.sort(key=lambda i: entries[i]["seconds"])
        self.batches, longest = [[]], 0.0
        for i in mine:
            longest = max(longest, entries[i]["seconds"])
            if self.batches[-1] and longest * (len(self.batches[-1]) + 1) > max_seconds:
                self.batches.append([])
                longest = entries[i]["seconds"]
            self.batches[-1].append(i)
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        shuffled = list(self.batches)
        random.Random(self.seed + self.epoch).shuffle(shuffled)
        self.epoch += 1
        return iter(shuffled)
