from dataclasses import dataclass

import numpy as np

HEADERS = {12: (2.0, 1.0, 1.0), 37: (8000.0, 1.0, 1.0), 44: (1.5, 1.0, 1.0)}  # of the second scanner


@dataclass(frozen=True)
class Case:
    """A scan: its voxels are made from its number, its spacing is that of the scanner (z, y, x) in mm."""

    number: int
    spacing: tuple[float, float, float]

    @property
    def name(self) -> str:
        return f"case_{self.number:03d}"

    @staticmethod
    def collection(n: int) -> "list[Case]":
        rng = np.random.default_rng(0)
        cases = [Case(i, (float(rng.uniform(1.0, 2.5)), 1.0, 1.0)) for i in range(n)]
        return [Case(c.number, HEADERS.get(c.number, c.spacing)) for c in cases]

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.number)
        image = rng.normal(size=(16, 64, 64)).astype(np.float32)
        z, y, x = rng.integers(4, 12), rng.integers(16, 48), rng.integers(16, 48)
        label = np.zeros(image.shape, dtype=np.uint8)
        label[z - 3 : z + 3, y - 10 : y + 10, x - 10 : x + 10] = 1
        image[label == 1] += 2.0
        return image, label


def split(cases, fold, folds=5):
    val = [c for c in cases if c.number % folds == fold]
    return [c for c in cases if c not in val], val
