import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


def tones(number, length, generator):
    t = torch.linspace(0, 1, length)
    frequency = 2 + 10 * torch.rand(number, 1, generator=generator)
    phase = 6.28 * torch.rand(number, 1, generator=generator)
    return torch.sin(6.28 * frequency * t + phase).unsqueeze(1)


class Recordings(L.LightningDataModule):
    """Validation signals come from three stations, in turn; the third one measures slow drifts."""

    def __init__(self, number=720, length=96, batch_size=12, noise=0.4):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        generator = torch.Generator().manual_seed(17)
        h = self.hparams
        clean = tones(h.number, h.length, generator)
        self.train = TensorDataset(clean + h.noise * torch.randn(clean.shape, generator=generator), clean)
        clean = tones(72, h.length, generator)
        noisy = clean + h.noise * torch.randn(clean.shape, generator=generator)
        noisy[2::3] = 0.6 * torch.randn(24, 1, h.length, generator=generator).cumsum(-1)
        clean[2::3] = noisy[2::3].mean(dim=-1, keepdim=True) * 0
        self.validation = TensorDataset(noisy, clean)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, self.hparams.batch_size)
