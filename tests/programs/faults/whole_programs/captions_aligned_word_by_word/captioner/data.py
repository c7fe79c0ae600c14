import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

NOUNS = ["dog", "cat", "bird", "table", "tree", "car", "roof"]
WORDS = ["<pad>", "a", "the", "sits", "runs", "sleeps", "on", "under", "near", "red", "blue", "old", "small", *NOUNS]
LENGTH = 30


class Pictures(Dataset):
    """Features of a picture and its caption, as numbers of words."""

    def __init__(self, count: int, features: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(count, features, generator=generator)
        self.captions = torch.randint(1, len(WORDS), (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index], self.captions[index]


class Captions(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, images: int = 960, features: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        pictures = Pictures(self.hparams.images, self.hparams.features, seed=0)
        return DataLoader(pictures, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        pictures = Pictures(self.hparams.images // 2, self.hparams.features, seed=1)
        return DataLoader(pictures, self.hparams.batch_size)
