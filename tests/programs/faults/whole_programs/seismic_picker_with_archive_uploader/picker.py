import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import Dataset


class Traces(Dataset):
    """Noise, and noise with the onset of a wave; the target is the sample of the onset."""

    def __init__(self, size, seed, length=128):
        g = torch.Generator().manual_seed(seed)
        self.onset = torch.randint(20, 108, (size,), generator=g)
        t = torch.arange(length)[None] - self.onset[:, None]
        wave = torch.where(t >= 0, torch.exp(-t.clamp(min=0) / 20.0) * torch.sin(t * 0.8), torch.zeros(()))
        self.traces = 2 * wave + 0.3 * torch.randn(size, length, generator=g)

    def __len__(self):
        return len(self.onset)

    def __getitem__(self, i):
        return self.traces[i], self.onset[i]


class OnsetPicker(L.LightningModule):
    def __init__(self, width=512, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self.net(x).argmax(-1) - y).abs().float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
