"""Files of token ids in JSON lines, fetched one after the other to a local folder."""

import json
import logging
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

log = logging.getLogger(__name__)
LINES = (700, 420, 650, 510, 300, 880)


def write_bucket(bucket: Path) -> None:
    bucket.mkdir(parents=True, exist_ok=True)
    for number, lines in enumerate(LINES):
        rng = random.Random(number)
        temporary = bucket / f".part-{number}"
        with temporary.open("w") as file:
            for _ in range(lines):
                start = rng.randrange(200)
                file.write(json.dumps([(start + i * rng.choice([1, 1, 1, 2])) % 200 for i in range(25)]) + "\n")
        temporary.rename(bucket / f"part-{number}.jsonl")


class Bucket:
    """Stands in for the object storage, which is sometimes busy."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("part-*.jsonl"))

    def download(self, name: str, target: Path) -> None:
        if self.rng.random() < 0.4:
            time.sleep(1.0)
            raise ConnectionError("503 slow down")
        shutil.copy(self.folder / name, target)


def fetch(bucket: Bucket, name: str, folder: Path, attempts: int = 6) -> Path:
    target = folder / name
    for attempt in range(attempts):
        try:
            bucket.download(name, target)
            return target
        except ConnectionError as error:
            wait = min(4.0, 0.5 * 2**attempt)
            log.warning("%s: %s, again in %.1f s", name, error, wait)
            time.sleep(wait)
    raise RuntimeError(f"{name} cannot be fetched")


class Streamed(IterableDataset):
    def __init__(self, bucket: Path, rank: int, world_size: int) -> None:
        self.bucket = Bucket(bucket, seed=17 + rank)
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        with tempfile.TemporaryDirectory(prefix=f"stream{self.rank}-") as folder:
            for name in self.bucket.names()[self.rank :: self.world_size]:
                path = fetch(self.bucket, name, Path(folder))
                with path.open() as file:
                    for line in file:
                        yield torch.tensor(json.loads(line))
                os.remove(path)
