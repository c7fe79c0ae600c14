"""Analog bits: pictures as bits of -1 and 1, and a network that predicts the clean bits."""

import random

import lightning as L
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from .unet import UNet


class BitDiffusion(L.LightningModule):
    def __init__(self, bits=4, size=16, lr=2e-4, self_condition=0.5, sampling_steps=6):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet(bits)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for unit in (self.net.time, self.net.down, self.net.mid, self.net.up):
            fully_shard(unit, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    @staticmethod
    def gamma(t):
        return torch.cos(t * torch.pi / 2).clamp(1e-4, 1) ** 2

    def add_noise(self, clean, t):
        g = self.gamma(t)[:, None, None, None]
        return g.sqrt() * clean + (1 - g).sqrt() * torch.randn_like(clean)

    def loss(self, clean, self_condition):
        t = torch.rand(len(clean), device=self.device)
        noisy = self.add_noise(clean, t)
        estimate = torch.zeros_like(noisy)
        if random.random() < self_condition:  # <- here
            with torch.no_grad():
                estimate = self.net(noisy, estimate, t)
        return F.mse_loss(self.net(noisy, estimate, t), clean)

    def on_train_start(self):
        # other noise on each rank, the same weights on all
        random.seed(100 + self.global_rank)
        torch.manual_seed(100 + self.global_rank)

    def training_step(self, clean, batch_idx):
        loss = self.loss(clean, self.hparams.self_condition)
        self.log("train_mse", loss, prog_bar=True)
        return loss

    def validation_step(self, clean, batch_idx):
        self.log("val_mse", self.loss(clean, 0.0), sync_dist=True)

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, self.hparams.bits, self.hparams.size, self.hparams.size, device=self.device)
        estimate = torch.zeros_like(x)
        for step in range(self.hparams.sampling_steps, 0, -1):
            t = torch.full((n,), step / self.hparams.sampling_steps, device=self.device)
            estimate = self.net(x, estimate, t)
            x = self.add_noise(estimate.clamp(-1, 1), t - 1 / self.hparams.sampling_steps)
        return estimate > 0

    def on_validation_epoch_end(self):
        share = self.sample(4).float().mean()
        self.log("share_of_ones", share, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
