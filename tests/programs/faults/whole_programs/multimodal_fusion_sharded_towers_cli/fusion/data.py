import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

SIZES = {"image": 64, "text": 64, "audio": 64}
RATES = {"image": 0.8, "text": 1.0, "audio": 0.45}


class Posts(Dataset):
    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 5, (count,), generator=generator)
        self.inputs = {
            name: torch.randn(count, size, generator=generator) + self.label[:, None] for name, size in SIZES.items()
        }
        self.present = {name: torch.rand(count, generator=generator) < rate for name, rate in RATES.items()}

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        return {
            "inputs": {name: x[index] for name, x in self.inputs.items()},
            "present": {name: x[index] for name, x in self.present.items()},
            "label": self.label[index],
        }


class PostData(L.LightningDataModule):
    def __init__(self, count: int = 12000, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.train = Posts(self.hparams.count, seed=1)
        self.val = Posts(400, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=50)
