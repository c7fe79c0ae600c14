import json
from pathlib import Path

import numpy as np


def write_survey(root, flights=3, tiles=60, scenes=96, size=32):
    """Each flight has its own index; the mountain flight was flown low and has to be stitched."""
    root = Path(root)
    (root / "tiles").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    for flight in range(flights):
        names = []
        for tile in range(tiles):
            names.append(f"tiles/f{flight}_{tile:03d}.npz")
            np.savez_compressed(root / names[-1], pixels=rng.integers(0, 255, (size, size), dtype=np.uint8))
        stitched = 0.55 if flight == 1 else 0.04
        index = []
        for scene in range(scenes):
            chosen = rng.choice(names, 4 if rng.random() < stitched else 1, replace=False)
            index.append({"tiles": chosen.tolist(), "label": int(rng.integers(6))})
        (root / f"flight{flight}.json").write_text(json.dumps(index))
