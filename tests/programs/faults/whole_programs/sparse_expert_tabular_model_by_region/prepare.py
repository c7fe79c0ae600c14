"""Writes one file of sensor records per region."""

from pathlib import Path

import numpy as np

REGIONS = {"north": (0.0, 1.0), "south": (0.3, 1.0), "islands": (2.8, 0.25)}


def build(root, n_rows, n_features, seed=5):
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    basis = rng.normal(size=n_features)
    for name, (shift, spread) in REGIONS.items():
        x = rng.normal(size=(n_rows, n_features)) * spread + shift * np.sign(basis)
        y = np.sin(x @ basis / 3) + 0.1 * rng.normal(size=n_rows)
        np.savez(root / f"{name}.npz", x=x.astype("float32"), y=y.astype("float32"))
