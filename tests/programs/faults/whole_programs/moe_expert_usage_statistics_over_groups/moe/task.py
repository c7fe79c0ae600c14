import lightning as L
import torch
from torch import nn

from .layers import SoftMoE


class Regression(L.LightningModule):
    def __init__(self, width: int = 32, experts: int = 2, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.moe = SoftMoE(width, experts)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.norm(x + self.moe(x))), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
