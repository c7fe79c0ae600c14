import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv1d(channels, channels, 5, padding=2)
        self.second = nn.Conv1d(channels, channels, 5, padding=2)

    def forward(self, x):
        return x + self.second(F.silu(self.first(x)))


class Denoiser(L.LightningModule):
    def __init__(self, channels=24, depth=3, lr=4e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(1, channels, 5, padding=2),
            *[ResidualBlock(channels) for _ in range(depth)],
            nn.Conv1d(channels, 1, 5, padding=2),
        )
        self.errors = []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net:
            if isinstance(block, ResidualBlock):
                fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = F.mse_loss(self.net(noisy), clean)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.errors.clear()

    def validation_step(self, batch, batch_idx):
        noisy, clean = batch
        error = F.l1_loss(self.net(noisy), clean)
        self.errors.append(error)
        self.log("val_error", error, prog_bar=True, sync_dist=True)

    def validation_error(self):
        return float(torch.stack(self.errors).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)]
