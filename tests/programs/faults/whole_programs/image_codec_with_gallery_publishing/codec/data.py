import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Gradients(Dataset):
    """Random colour gradients, 32 x 32."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.corners = torch.rand(n, 3, 2, 2, generator=g)

    def __len__(self):
        return len(self.corners)

    def __getitem__(self, i):
        return torch.nn.functional.interpolate(self.corners[i : i + 1], 32, mode="bilinear", align_corners=True)[0]


class GradientData(L.LightningDataModule):
    def __init__(self, n_train: int = 960, n_val: int = 128, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(Gradients(self.hparams.n_train, 0), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Gradients(self.hparams.n_val, 1), self.hparams.batch_size)
