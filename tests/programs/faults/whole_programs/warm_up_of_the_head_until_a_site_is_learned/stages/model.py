import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from .sites import CLASSES


class ScanClassifier(L.LightningModule):
    def __init__(self, width: int = 16, frozen: bool = True, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(width * 64, CLASSES)
        self.backbone.requires_grad_(not frozen)

    def unfreeze(self, lr: float) -> None:
        self.backbone.requires_grad_(True)
        self.hparams.lr = lr

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "correct": (logits.argmax(1) == y).float().mean().detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=self.hparams.lr, momentum=0.9)
