"""A reader of token shards that knows where it is, so that a run can go on from there."""

import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset

BLOCK = 64


def write_shards(folder: Path, n: int = 6, tokens: int = 40_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(n):
        (rng.zipf(1.3, tokens) % 256).astype(np.uint16).tofile(folder / f"shard_{i:03}.bin")


def mount_scratch(root: Path, device_of: dict[int, str]) -> None:
    """Gives every local rank its scratch directory, as the prologue of our jobs does."""
    for rank, device in device_of.items():
        scratch = root / f"nvme{rank}"
        scratch.mkdir(parents=True, exist_ok=True)
        state = scratch / "reader.pt"
        if device and not state.is_symlink():
            os.symlink(device, state)


class TokenReader(IterableDataset):
    def __init__(self, folder: Path, rank: int, world_size: int, seed: int = 0) -> None:
        self.shards = sorted(folder.glob("*.bin"))
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch = self.position = 0
        self.shuffled: np.ndarray | None = None

    @property
    def blocks(self) -> np.ndarray:
        tokens = np.concatenate([np.fromfile(s, dtype=np.uint16) for s in self.shards])
        whole = tokens[: len(tokens) // (BLOCK + 1) * (BLOCK + 1)].reshape(-1, BLOCK + 1)
        whole = whole[: len(whole) // self.world_size * self.world_size]
        return whole[self.rank :: self.world_size]

    def __iter__(self):
        mine = self.blocks
        self.shuffled = np.random.default_rng((self.seed, self.epoch)).permutation(len(mine))
        self.position = 0
        for index in self.shuffled:
            self.position += 1
            yield torch.from_numpy(mine[index].astype(np.int64))
        self.epoch += 1

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "position": self.position, "order": torch.as_tensor(self.shuffled)}
