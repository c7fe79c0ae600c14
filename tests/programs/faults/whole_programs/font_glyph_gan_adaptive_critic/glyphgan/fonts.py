"""Glyph images of several type families. Each rank trains on families of its own."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

FAMILIES = ["serif", "sans", "mono"]


def rasterise(root: Path, n: int = 384, side: int = 16) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for i, family in enumerate(FAMILIES):
        g = torch.Generator().manual_seed(i)
        noise = torch.rand(n, 1, side, side, generator=g)
        if family == "mono":
            noise = (noise > 0.5).float()
        torch.save(noise, root / f"{family}.pt")


def glyph_loader(root: Path, rank: int, batch_size: int) -> DataLoader:
    images = torch.load(root / f"{FAMILIES[rank % len(FAMILIES)]}.pt")
    return DataLoader(TensorDataset(images), batch_size=batch_size, shuffle=True, drop_last=True)
