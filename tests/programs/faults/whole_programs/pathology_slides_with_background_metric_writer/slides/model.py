import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class SlideClassifier(L.LightningModule):
    def __init__(self, dim=24, hidden=64, classes=3, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, classes))

    def training_step(self, batch, batch_idx):
        per_slide = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        loss = per_slide.mean()
        self.log("train/loss", loss, prog_bar=True)
        return {"loss": loss, "per_slide": per_slide.detach()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
