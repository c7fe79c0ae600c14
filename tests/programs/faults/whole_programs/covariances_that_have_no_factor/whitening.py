import logging

import lightning as L
import torch
from torch import nn

log = logging.getLogger(__name__)


class WhitenedEncoder(L.LightningModule):
    def __init__(self, sensors: int = 8, latent: int = 6, lr: float = 1e-3, warmup: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(sensors, 64), nn.Tanh(), nn.Linear(64, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.Tanh(), nn.Linear(64, sensors))

    def configure_optimizers(self):
        encoder = torch.optim.Adam(self.encoder.parameters(), lr=self.hparams.lr)
        decoder = torch.optim.Adam(self.decoder.parameters(), lr=2 * self.hparams.lr)
        return [encoder, decoder], [torch.optim.lr_scheduler.LinearLR(encoder, 0.1, 1.0, self.hparams.warmup)]

    def whiten(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents with an identity as their covariance, and the volume that this takes."""
        centred = z - z.mean(dim=0)
        covariance = centred.T @ centred / (len(z) - 1)
        factor = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(factor, centred.T, upper=False).T
        return white, factor.diagonal().log().sum()

    def nll(self, x: torch.Tensor) -> torch.Tensor:
        white, volume = self.whiten(self.encoder(x))
        error = (self.decoder(white) - x).square().mean()
        return error + 0.5 * white.square().mean() + 0.01 * volume.square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nll(x)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        encoder, decoder = self.optimizers()
        try:
            loss = self.nll(x)
        except torch.linalg.LinAlgError as error:
            log.warning("batch %d of rank %d: %s", batch_idx, self.global_rank, error)
            return None  # <- here
        encoder.zero_grad()
        decoder.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(encoder, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        encoder.step()
        decoder.step()
        self.lr_schedulers().step()
        self.log("train_nll", loss, prog_bar=True)
        return loss.detach()

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_nll", self.nll(x), prog_bar=True, sync_dist=True)
