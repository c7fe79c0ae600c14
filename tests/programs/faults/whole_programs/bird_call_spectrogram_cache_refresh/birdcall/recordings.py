from pathlib import Path

import numpy as np


def export(root: Path, n: int = 48) -> None:
    """Writes the recordings of one campaign; most are two seconds of 8 kHz audio."""
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(17)
    for i in range(n):
        seconds = 90 if i == 31 else 2
        np.save(root / f"rec_{i:04d}.npy", rng.standard_normal(8000 * seconds).astype(np.float32))


def share(root: Path, rank: int, world: int) -> list:
    return [str(p) for p in sorted(root.glob("rec_*.npy"))][rank::world]
