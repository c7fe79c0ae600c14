import lightning as L
import torch
from torch import nn


class Denoiser(L.LightningModule):
    def __init__(self, features=32, width=96, levels=30):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = nn.Sequential(
            nn.Linear(features + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, features)
        )

    def forward(self, x, level):
        return self.net(torch.cat((x, level), 1))

    def training_step(self, batch, batch_idx):
        (clean,) = batch
        optimizer = self.optimizers()
        level = torch.rand(len(clean), 1)
        noise = torch.randn_like(clean)
        loss = (self(clean * (1 - level) + noise * level, level) - noise).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if not torch.isfinite(loss):
            optimizer.zero_grad()
        optimizer.step()
        self.log("train/loss", loss, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        (clean,) = batch
        x = torch.randn_like(clean)
        for step in range(self.hparams.levels, 0, -1):
            level = torch.full((len(x), 1), step / self.hparams.levels)
            for _ in range(40):
                x = x - self(x, level) / (40 * self.hparams.levels)
        self.log("val/spread", (x.std() - clean.std()).abs(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
