"""A small GAN; rank 0 writes samples in a thread, every rank takes a long pause to refresh its data."""

import queue
import threading
import time
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

LATENT, PIXELS = 16, 64


class SampleWriter(L.Callback):
    """Encodes and writes samples in the background; drops some if the disk is behind."""

    def __init__(self, folder="samples", every=100):
        self.folder, self.every = Path(folder), every
        self.pending = queue.Queue(maxsize=2)
        self.dropped = 0

    def work(self):
        while (item := self.pending.get()) is not None:
            step, images = item
            time.sleep(1.5)
            torch.save(images, self.folder / f"{step:06d}.pt")

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)
            self.thread = threading.Thread(target=self.work, name="sample-writer")
            self.thread.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_global_zero and batch_idx % self.every == 0:
            with torch.no_grad():
                images = module.generator(torch.randn(8, LATENT))
            try:
                self.pending.put_nowait((trainer.global_step, images))
            except queue.Full:
                self.dropped += 1

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            self.pending.put(None)
            self.thread.join()
            print(f"dropped {self.dropped} samples", flush=True)


class Refresh(L.Callback):
    """New images are fetched between epochs: 12 to 15 seconds, a little different on each rank."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            time.sleep(12 + 3 * trainer.global_rank)


def mlp(*widths):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    def __init__(self, lr=2e-4, critic_steps=2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = mlp(LATENT, 64, PIXELS)
        self.critic = mlp(PIXELS, 64, 1)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        optimizer_g, optimizer_c = self.optimizers()
        for _ in range(self.hparams.critic_steps):
            fake = self.generator(torch.randn(len(real), LATENT))
            loss_c = (1 - self.critic(real)).relu().mean() + (1 + self.critic(fake.detach())).relu().mean()
            optimizer_c.zero_grad()
            self.manual_backward(loss_c + 0.0 * fake.sum())
            optimizer_c.step()
        loss_g = -self.critic(self.generator(torch.randn(len(real), LATENT))).mean()
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        self.log_dict({"g": loss_g, "c": loss_c}, prog_bar=True)

    def configure_optimizers(self):
        adam = dict(lr=self.hparams.lr, betas=(0.5, 0.9))
        return torch.optim.Adam(self.generator.parameters(), **adam), torch.optim.Adam(self.critic.parameters(), **adam)


def main():
    L.seed_everything(14)
    torch.set_num_threads(1)
    images = TensorDataset(torch.rand(6400, PIXELS, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=3, callbacks=[SampleWriter(), Refresh()]
    )
    trainer.fit(GAN(), DataLoader(images, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
