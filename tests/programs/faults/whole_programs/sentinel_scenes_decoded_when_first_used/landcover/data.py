import io
from functools import cached_property
from pathlib import Path

import lightning as L
import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset

SIDE = 64


def paint(index: int) -> Image.Image:
    """A scene of fields or of a town; every third one in the sensor's full resolution."""
    rng = np.random.default_rng(index)
    cells = rng.integers(0, 255, (4, 4, 3) if index % 2 else (24, 24, 3), dtype=np.uint8)
    side = 1000 if index % 3 == 1 else 600
    return Image.fromarray(cells).resize((side, side), Image.Resampling.NEAREST)


class SceneFolder(Dataset):
    def __init__(self, root: Path, numbers: range) -> None:
        self.root, self.numbers = root, numbers
        self.decoded: dict[int, torch.Tensor] = {}

    @cached_property
    def files(self) -> list[Path]:
        return [self.root / f"{number:04d}.png" for number in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def decode(self, index: int) -> torch.Tensor:
        with Image.open(io.BytesIO(self.files[index].read_bytes())) as scene:
            small = scene.convert("RGB").filter(ImageFilter.GaussianBlur(2)).resize((SIDE, SIDE))
        return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).float() / 255

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index not in self.decoded:
            self.decoded[index] = self.decode(index)
        return self.decoded[index], self.numbers[index] % 2


class Scenes(L.LightningDataModule):
    def __init__(self, root: Path = Path("scenes"), scenes: int = 240, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self) -> None:
        root = Path(self.hparams.root)
        root.mkdir(parents=True, exist_ok=True)
        for number in range(self.hparams.scenes):
            paint(number).save(root / f"{number:04d}.png", compress_level=1)

    def setup(self, stage: str) -> None:
        split = self.hparams.scenes * 4 // 5
        root = Path(self.hparams.root)
        self.train = SceneFolder(root, range(split))
        self.val = SceneFolder(root, range(split, self.hparams.scenes))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size)
