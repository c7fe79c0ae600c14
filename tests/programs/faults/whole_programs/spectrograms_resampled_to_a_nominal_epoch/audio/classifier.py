import lightning as L
import torch
from torch import nn
from torchmetrics import Accuracy, MetricCollection


class SpecAugment(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.width = width

    def forward(self, x):
        if self.training:
            start = int(torch.randint(0, x.shape[-1] - self.width, ()))
            x = x.clone()
            x[..., start : start + self.width] = 0
        return x


class Classifier(L.LightningModule):
    def __init__(self, classes: int = 4, hidden: int = 64, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(SpecAugment(), nn.GRU(20, hidden, batch_first=True))
        self.head = nn.Linear(hidden, classes)
        self.metrics = MetricCollection({"acc": Accuracy("multiclass", num_classes=classes)}, prefix="valid_")

    def forward(self, x):
        return self.head(self.net(x.transpose(1, 2))[0].mean(1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(x))
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.metrics.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics.compute(), prog_bar=True)
        self.metrics.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
