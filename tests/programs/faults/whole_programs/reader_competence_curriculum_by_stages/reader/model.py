import lightning as L
import torch
from torch import nn


class Marker(L.LightningModule):
    def __init__(self, features=20, width=64, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("train/right", (logits.argmax(1) == y).float().mean(), prog_bar=True)
        return nn.functional.cross_entropy(logits, y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr * 10, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)}
