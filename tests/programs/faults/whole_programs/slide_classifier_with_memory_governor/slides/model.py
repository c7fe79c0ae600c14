import lightning as L
import torch
from torch import nn


class TileClassifier(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(3, 12, 3, 2), nn.ReLU(), nn.Conv2d(12, 24, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
        )
        self.net(torch.zeros(1, 3, 16, 16))

    def training_step(self, batch, batch_idx):
        tiles, labels = batch
        loss = nn.functional.cross_entropy(self.net(tiles), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
