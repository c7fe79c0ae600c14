import logging
import pickle
import time
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, get_worker_info

log = logging.getLogger(__name__)


class ShardReader:
    """Reads tiles from a shard; tolerates a writer or an NFS client that is a little behind."""

    def __init__(self, path, pause=1.0):
        self.path, self.pause = path, pause

    def __iter__(self):
        with self.path.open("rb") as f:
            while f.peek(1):
                start = f.tell()
                while True:
                    try:
                        tile = pickle.load(f)
                        break
                    except (EOFError, pickle.UnpicklingError):
                        log.info("%s: incomplete tile at %d, waiting for the rest", self.path.name, start)
                        time.sleep(self.pause)  # <- here
                        f.seek(start)
                yield torch.from_numpy(tile["image"]), tile["cover"]


class TileStream(IterableDataset):
    def __init__(self, root, rank, world, buffer=64, seed=0):
        self.shards = sorted(Path(root).glob("scenes-*.pkl"))[rank::world]
        self.buffer, self.seed, self.epoch = buffer, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        info = get_worker_info()
        shards = self.shards if info is None else self.shards[info.id :: info.num_workers]
        pool = []
        for shard in shards:
            for item in ShardReader(shard):
                if len(pool) < self.buffer:
                    pool.append(item)
                    continue
                k = int(torch.randint(self.buffer, (1,), generator=g))
                pool[k], item = item, pool[k]
                yield item
        yield from pool
