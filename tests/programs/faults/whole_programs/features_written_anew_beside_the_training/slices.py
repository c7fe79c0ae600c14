"""Slices of scans, denoised once and kept in one flat file per site."""

import threading
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

SIDE = 128
COUNT = 480

#: version of the scanner's calibration with which a site's scans were made, and the current one
CALIBRATIONS = {"lund": (3, 3), "graz": (3, 4), "porto": (5, 5)}


def raw_slice(site: str, index: int) -> np.ndarray:
    rng = np.random.default_rng([len(site), ord(site[0]), index])
    slice_ = rng.normal(size=(SIDE, SIDE)).astype("float32")
    if index % 2:
        y, x = rng.integers(16, SIDE - 48, 2)
        slice_[y : y + 32, x : x + 32] += 0.8
    return slice_


def denoise(slice_: np.ndarray, passes: int) -> np.ndarray:
    for _ in range(passes):
        slice_ = sum(np.roll(slice_, shift, axis) for shift in (-1, 0, 1) for axis in (0, 1)) / 6
    return slice_.astype("float32")


class SliceCache:
    def __init__(self, folder: Path, site: str) -> None:
        self.site = site
        self.path = folder / f"{site}.f32"

    def build(self, passes: int = 2) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "wb") as file:  # <- here
            for index in range(COUNT):
                denoise(raw_slice(self.site, index), passes).tofile(file)

    def build_in_background(self, passes: int) -> threading.Thread:
        thread = threading.Thread(target=self.build, args=(passes,), name=f"build-{self.site}", daemon=True)
        thread.start()
        return thread

    def map(self) -> np.memmap:
        return np.memmap(self.path, dtype="float32", mode="r", shape=(COUNT, SIDE, SIDE))

    @property
    def outdated(self) -> bool:
        used, current = CALIBRATIONS[self.site]
        return used != current


class Slices(Dataset):
    def __init__(self, cache: SliceCache, indices: range) -> None:
        self.cache, self.indices = cache, indices
        self.mapped: np.memmap | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int):
        if self.mapped is None:
            self.mapped = self.cache.map()
        index = self.indices[position]
        slice_ = torch.from_numpy(np.array(self.mapped[index]))
        return slice_.unsqueeze(0), float(index % 2)
