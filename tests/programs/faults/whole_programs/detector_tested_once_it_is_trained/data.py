from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


@dataclass
class Scene:
    image: Tensor
    box: Tensor
    label: int


class Squares(Dataset[tuple[Tensor, Tensor, int]]):
    """Grey images with one bright rectangle; the class is its orientation."""

    def __init__(self, count: int, size: int = 32, seed: int = 0) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def scene(self, index: int) -> Scene:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + index)
        image = torch.rand(1, self.size, self.size, generator=generator) * 0.3
        label = int(torch.randint(2, (1,), generator=generator))
        width, height = (12, 5) if label else (5, 12)
        x, y = (int(v) for v in torch.randint(0, self.size - 12, (2,), generator=generator))
        image[:, y : y + height, x : x + width] += 0.6
        box = torch.tensor([x, y, x + width, y + height], dtype=torch.float32) / self.size
        return Scene(image, box, label)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        scene = self.scene(index)
        return scene.image, scene.box, scene.label


class SquaresModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, train: int = 1440, held_out: int = 192) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.sizes = {"train": train, "val": held_out, "test": held_out}

    def _loader(self, split: str) -> DataLoader:
        dataset = Squares(self.sizes[split], seed=list(self.sizes).index(split))
        return DataLoader(dataset, self.batch_size, shuffle=split == "train")

    def train_dataloader(self) -> DataLoader:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")
