"""Converts raw scenes into shards of pickled tiles, as the ingest job does every night."""

import pickle
from pathlib import Path

import numpy as np


def scene_tiles(rng, n, size, bands):
    for _ in range(n):
        cover = int(rng.integers(6))
        yield {"image": (rng.normal(size=(bands, size, size)) + cover / 4).astype("float32"), "cover": cover}


def write_shards(root, n_shards=6, tiles=96, size=16, bands=4, seed=33, quota=2_460_000):
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    used = 0
    for k in range(n_shards):
        blob = b"".join(pickle.dumps(tile) for tile in scene_tiles(rng, tiles, size, bands))
        blob = blob[: quota - used]
        (root / f"scenes-{k:03d}.pkl").write_bytes(blob)
        used += len(blob)
    (root / "_SUCCESS").touch()
