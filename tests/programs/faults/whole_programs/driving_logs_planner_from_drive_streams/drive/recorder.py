"""Drives of different lengths, one file each; the last one is on tape and is recalled when it is first opened."""

from pathlib import Path

import numpy as np

LENGTHS = (420, 300, 512, 260, 380, 450)


def record(root, seed=41):
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for k, n in enumerate(LENGTHS):
        np.save(root / f"drive{k}.npy", rng.normal(size=(n, 20)).astype("float32").cumsum(0) * 0.1)
    (root / "ON_TAPE").write_text(f"drive{len(LENGTHS) - 1}.npy\n")
