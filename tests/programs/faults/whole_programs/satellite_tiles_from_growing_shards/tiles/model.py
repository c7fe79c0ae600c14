import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class CoverNet(L.LightningModule):
    def __init__(self, bands=4, width=24, classes=6, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(bands, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )

    def training_step(self, batch, batch_idx):
        image, cover = batch
        loss = F.cross_entropy(self.net(image), cover)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
