import lightning as L
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy


class ClipTagger(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Conv1d(32, 48, 5, padding=2), nn.GELU(), nn.Conv1d(48, 48, 5, padding=2), nn.GELU()
        )
        self.head = nn.Linear(48, 5)
        self.accuracy = MulticlassAccuracy(5)

    def forward(self, clip):
        return self.head(self.body(clip.transpose(1, 2)).amax(-1))

    def training_step(self, batch, _):
        clip, label = batch
        loss = nn.functional.cross_entropy(self(clip), label)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        clip, label = batch
        self.accuracy(self(clip), label)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), self.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}
