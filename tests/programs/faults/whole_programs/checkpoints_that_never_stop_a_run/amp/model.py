import lightning as L
import torch
from torch import nn


class AmpModel(L.LightningModule):
    def __init__(self, channels: int = 128, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.inlet = nn.Conv1d(1, channels, 1)
        self.layers = nn.ModuleList(nn.Conv1d(channels, channels, 3, dilation=2**k) for k in range(5))
        self.outlet = nn.Conv1d(channels, 1, 1)

    def forward(self, x):
        h = self.inlet(x[:, None])
        for layer in self.layers:
            h = h[..., -(h.shape[-1] - 2 * layer.dilation[0]) :] + torch.tanh(layer(h))
        return self.outlet(h)[:, 0]

    def step(self, batch):
        x, y = batch
        predicted = self(x)[:, -y.shape[1] :]
        return ((predicted - y) ** 2).mean() / (y**2).mean().clamp(min=1e-6)

    def training_step(self, batch, batch_idx):
        esr = self.step(batch)
        self.log("train_esr", esr)
        return esr

    def validation_step(self, batch, batch_idx):
        self.log("esr", self.step(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)}
