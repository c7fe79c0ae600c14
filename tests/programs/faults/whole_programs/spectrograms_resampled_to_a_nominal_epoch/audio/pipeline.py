"""Composable stages over a stream of samples, after the fashion of WebDataset."""

import itertools
import random
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

SIZES = [300, 40, 260, 310, 25, 280, 290, 60, 20, 400]  # samples of a shard
COLD_READ_S = 0.8


class Pipeline(IterableDataset):
    def __init__(self, source, *stages):
        self.source, self.stages = source, stages

    def __iter__(self):
        stream = self.source()
        for stage in self.stages:
            stream = stage(stream)
        return iter(stream)


class Shards:
    """The shards of a rank; the archive brings a shard from tape when it is first read."""

    def __init__(self, paths, resampled, seed):
        self.paths, self.resampled = list(paths), resampled
        self.rng = random.Random(seed)
        self.warm = set()

    def __call__(self):
        if not self.resampled:
            yield from self.paths
        while self.resampled:
            path = self.rng.choice(self.paths)
            if path not in self.warm:
                time.sleep(COLD_READ_S * (1 + int(path.stem) % 3))
                self.warm.add(path)
            yield path


def samples(paths):
    for path in paths:
        with np.load(path) as shard:
            images, labels = shard["images"], shard["labels"]
        yield from zip(images, labels)


def shuffle(size, seed):
    rng = random.Random(seed)

    def stage(stream):
        stream = iter(stream)
        buffer = list(itertools.islice(stream, size))
        for sample in stream:
            k = rng.randrange(size)
            yield buffer[k]
            buffer[k] = sample
        yield from buffer

    return stage


def batched(size):
    def stage(stream):
        stream = iter(stream)
        while chunk := list(itertools.islice(stream, size)):
            images, labels = zip(*chunk)
            yield torch.from_numpy(np.stack(images)), torch.tensor(np.stack(labels))

    return stage


def with_epoch(batches):
    return lambda stream: itertools.islice(stream, batches)


class SpectrogramShards(L.LightningDataModule):
    def __init__(self, root: str, batch_size: int = 16, batches_per_epoch: int = 100, classes: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.root = Path(root)

    def prepare_data(self):
        self.root.mkdir(exist_ok=True)
        for number, size in enumerate(SIZES):
            rng = np.random.default_rng(number)
            labels = rng.integers(0, self.hparams.classes, size)
            images = rng.normal(size=(size, 20, 24)).astype(np.float32)
            images[np.arange(size), labels * 4] += 1.5
            np.savez(self.root / f"{number:04d}.npz", images=images, labels=labels)

    def _loader(self, source, *stages, batches):
        return DataLoader(
            Pipeline(source, samples, *stages, batched(self.hparams.batch_size), with_epoch(batches)), None
        )

    def train_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        mine = sorted(self.root.glob("*.npz"))[:-1][rank::world]
        source = Shards(mine, resampled=True, seed=rank)
        return self._loader(source, shuffle(64, rank), batches=self.hparams.batches_per_epoch)

    def val_dataloader(self):
        last = sorted(self.root.glob("*.npz"))[-1:]
        return self._loader(Shards(last, resampled=False, seed=0), batches=10)
