"""DCGAN on 16x16 shapes, two optimizers, FID after each epoch."""

import argparse

import lightning as L
import torch
from callbacks import FidCallback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from networks import Discriminator, Generator
from shapes import Shapes
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


class DCGAN(L.LightningModule):
    def __init__(self, latent=32, lr=2e-4, b1=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent)
        self.discriminator = Discriminator()
        self.loss = torch.nn.BCEWithLogitsLoss()
        self.register_buffer("fixed_z", torch.randn(16, latent))

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        real = batch
        z = torch.randn(len(real), self.hparams.latent, device=self.device)

        self.toggle_optimizer(opt_d)
        pred_real = self.discriminator(real)
        pred_fake = self.discriminator(self(z).detach())
        d_loss = 0.5 * (
            self.loss(pred_real, torch.ones_like(pred_real)) + self.loss(pred_fake, torch.zeros_like(pred_fake))
        )
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        pred = self.discriminator(self(z))
        g_loss = self.loss(pred, torch.ones_like(pred))
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        pred = self.discriminator(batch)
        self.log("val/d_real", self.loss(pred, torch.ones_like(pred)), sync_dist=True)

    def configure_optimizers(self):
        lr, b1 = self.hparams.lr, self.hparams.b1
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(b1, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(b1, 0.999))
        return [opt_g, opt_d], []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--fid-images", type=int, default=512)
    args = parser.parse_args()

    L.seed_everything(7, workers=True)
    train = DataLoader(Shapes(3200), batch_size=args.batch_size, shuffle=True)
    val = DataLoader(Shapes(320, offset=3200), batch_size=args.batch_size)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(find_unused_parameters=True),
        max_epochs=args.epochs,
        logger=CSVLogger("runs", name="dcgan"),
        callbacks=[
            ModelCheckpoint(monitor="val/d_real", filename="{epoch}", save_top_k=2),
            FidCallback(num_images=args.fid_images),
        ],
        log_every_n_steps=10,
    )
    trainer.fit(DCGAN(), train, val)


if __name__ == "__main__":
    main()
