"""Tiles of a satellite pass, stored as fixed-size records: an 8-byte header and float16 pixels."""

import struct
from pathlib import Path

import numpy as np

SIDE = 32
MAGIC = 0x5EA1CE


def write_pass(path: Path, tiles: int, seed: int, truncate: int = 0) -> None:
    rng = np.random.default_rng(seed)
    blob = b"".join(
        struct.pack("<II", MAGIC, int(rng.integers(0, 4)))
        + rng.random(SIDE * SIDE, dtype=np.float32).astype("<f2").tobytes()
        for _ in range(tiles)
    )
    path.write_bytes(blob[: len(blob) - truncate])


def read_pass(path: Path):
    size = 8 + SIDE * SIDE * 2
    with path.open("rb") as f:
        while record := f.read(size):
            magic, label = struct.unpack_from("<II", record)
            assert magic == MAGIC, f"{path}: not a tile record"
            pixels = np.frombuffer(record, "<f2", offset=8).reshape(SIDE, SIDE)
            yield pixels.astype(np.float32), label
