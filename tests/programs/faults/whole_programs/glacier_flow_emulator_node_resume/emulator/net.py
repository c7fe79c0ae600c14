import lightning as L
import torch
from torch import nn


class FlowEmulator(L.LightningModule):
    def __init__(self, width: int = 24, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def training_step(self, batch, batch_idx):
        bed, velocity = batch
        loss = nn.functional.l1_loss(self.net(bed), velocity)
        self.log("train/l1", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        bed, velocity = batch
        self.log("val/l1", nn.functional.l1_loss(self.net(bed), velocity), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 2)}
