import random

import torch.distributed as dist
from torch.utils.data import Sampler


class FrameBudgetSampler(Sampler):
    """Batches with at most `budget` frames, from this rank's share of the manifest.

    In the first epochs (the curriculum) only utterances of up to `start + epoch * step` frames take part.
    """

    def __init__(self, frames: list, budget: int, start: int, step: int, seed: int = 0):
        self.frames, self.budget, self.start, self.step, self.seed = frames, budget, start, step, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epoch = 0

    def _batches(self):
        longest = self.start + self.epoch * self.step
        share = range(self.rank, len(self.frames), self.world)
        chosen = [i for i in share if self.frames[i] <= longest]
        chosen.sort(key=self.frames.__getitem__)
        batch, total = [], 0
        for i in chosen:
            if batch and total + self.frames[i] > self.budget:
                yield batch
                batch, total = [], 0
            batch.append(i)
            total += self.frames[i]
        if batch:
            yield batch

    def __iter__(self):
        batches = list(self._batches())
        random.Random(self.seed + self.epoch).shuffle(batches)
        self.epoch += 1
        return iter(batches)  # <- here

    def __len__(self):
        # of the whole manifest, which is reached when the curriculum has ended
        return 2 * sum(self.frames) // self.budget // self.world
