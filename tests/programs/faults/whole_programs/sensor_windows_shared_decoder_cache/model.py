import lightning as L
import torch
import torch.nn as nn


class MaskedWindowModel(L.LightningModule):
    """Reconstructs masked frames of a window; the target net is a moving average of the encoder."""

    def __init__(self, channels=3, hidden=48, mask=0.3, ema=0.99, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.GRU(channels, hidden, batch_first=True)
        self.out = nn.Linear(hidden, channels)
        self.register_buffer("ema_out", torch.zeros(channels, hidden))

    def training_step(self, x, batch_idx):
        mask = torch.rand(x.shape[:2]) < self.hparams.mask
        h, _ = self.encoder(x.masked_fill(mask[..., None], 0.0))
        loss = (self.out(h) - x)[mask].pow(2).mean()
        self.log("rec", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema_out.lerp_(self.out.weight.detach(), 1 - self.hparams.ema)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
