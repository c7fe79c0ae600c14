import io
import json
import random
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .shards import read_shard, write_shards


def split_by_node(urls):
    if dist.is_available() and dist.is_initialized():
        return urls[dist.get_rank() :: dist.get_world_size()]  # <- here
    return urls


def split_by_worker(urls):
    info = get_worker_info()
    return urls if info is None else urls[info.id :: info.num_workers]


def shuffled(stream, size, rng):
    buffer = []
    for sample in stream:
        buffer.append(sample)
        if len(buffer) >= size:
            yield buffer.pop(rng.randrange(len(buffer)))
    rng.shuffle(buffer)
    yield from buffer


class TarDataset(IterableDataset):
    def __init__(self, urls, shuffle_buffer=0):
        self.urls = split_by_node(list(urls))
        self.shuffle_buffer = shuffle_buffer
        self.epoch = 0

    @staticmethod
    def decode(sample):
        image = torch.from_numpy(np.load(io.BytesIO(sample["npy"])))
        tokens = torch.tensor(json.loads(sample["json"])["tokens"])
        return image, tokens

    def __iter__(self):
        urls = split_by_worker(self.urls)
        stream = (sample for url in urls for sample in read_shard(url))
        if self.shuffle_buffer:
            stream = shuffled(stream, self.shuffle_buffer, random.Random(self.epoch))
        self.epoch += 1
        yield from map(self.decode, stream)


class CaptionShards(L.LightningDataModule):
    """Shards of 256 samples, made at the first start if they are not there yet."""

    def __init__(
        self, root: str = "shards", batch_size: int = 16, num_workers: int = 1, vocab_size: int = 500, total: int = 2014
    ):
        super().__init__()
        self.save_hyperparameters()
        self.root = Path(root)

    def prepare_data(self):
        hp = self.hparams
        if not (self.root / "train").exists():
            write_shards(self.root / "train", hp.total, 256, hp.vocab_size)
            write_shards(self.root / "val", 256, 64, hp.vocab_size, seed=1)

    def setup(self, stage=None):
        self.train_set = TarDataset(sorted((self.root / "train").glob("*.tar")), shuffle_buffer=100)
        self.val_set = TarDataset(sorted((self.root / "val").glob("*.tar")))

    def _loader(self, dataset):
        return DataLoader(dataset, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)

    def train_dataloader(self):
        return self._loader(self.train_set)

    def val_dataloader(self):
        return self._loader(self.val_set)
