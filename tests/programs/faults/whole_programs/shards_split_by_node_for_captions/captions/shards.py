"""Writes and reads shards: tar files of <key>.npy (image) and <key>.json (caption)."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_shards(folder: Path, total: int, per_shard: int, vocab_size: int, seed: int = 0) -> list[Path]:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for start in range(0, total, per_shard):
        path = folder / f"{len(paths):05d}.tar"
        with tarfile.open(path, "w") as tar:
            for key in range(start, min(start + per_shard, total)):
                image = io.BytesIO()
                np.save(image, rng.normal(size=(3, 16, 16)).astype(np.float32))
                _add(tar, f"{key:08d}.npy", image.getvalue())
                tokens = rng.integers(1, vocab_size, size=12).tolist()
                _add(tar, f"{key:08d}.json", json.dumps({"tokens": tokens}).encode())
        paths.append(path)
    return paths


def read_shard(path: Path) -> Iterator[dict]:
    sample: dict = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, ext = member.name.partition(".")
            if sample and sample["key"] != key:
                yield sample
                sample = {}
            sample["key"] = key
            sample[ext] = tar.extractfile(member).read()
    if sample:
        yield sample
