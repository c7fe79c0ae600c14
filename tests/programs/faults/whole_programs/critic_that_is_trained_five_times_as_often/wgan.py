import threading
import time
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


def rings(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    angle = torch.rand(n, generator=g) * 6.2832
    radius = 1 + torch.randint(0, 3, (n,), generator=g)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.03 * torch.randn(n, 2, generator=g)


def mlp(*sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class WGAN(L.LightningModule):
    def __init__(self, latent=8, n_critic=5, gp=5.0, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen = mlp(latent, 96, 96, 2)
        self.critic = mlp(2, 96, 96, 1)
        self.n_critic = n_critic

    def sample(self, n):
        return self.gen(torch.randn(n, self.hparams.latent))

    def penalty(self, real, fake):
        a = torch.rand(len(real), 1)
        x = (a * real + (1 - a) * fake).requires_grad_()
        (grad,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return ((grad.norm(dim=1) - 1) ** 2).mean()

    def critic_step(self, real, opt):
        fake = self.sample(len(real)).detach()
        gap = self.critic(fake).mean() - self.critic(real).mean()
        opt.zero_grad()
        self.manual_backward(gap + self.hparams.gp * self.penalty(real, fake))
        opt.step()
        self.log("gap", -gap, prog_bar=True)

    def generator_step(self, n, opt):
        loss = -self.critic(self.sample(n)).mean()
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.log("gen", loss, prog_bar=True)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_gen, opt_critic = self.optimizers()
        if (batch_idx + 1) % (self.n_critic + 1):
            self.toggle_optimizer(opt_critic)
            self.critic_step(real, opt_critic)
            self.untoggle_optimizer(opt_critic)
        else:
            self.toggle_optimizer(opt_gen)
            self.generator_step(len(real), opt_gen)
            self.untoggle_optimizer(opt_gen)

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        self.log("val_gap", self.critic(real).mean() - self.critic(self.sample(len(real))).mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        # a critic that is far behind gets more steps
        gap = self.trainer.strategy.reduce(torch.rand(()) + self.current_epoch, reduce_op="mean")
        self.n_critic = 3 if gap > 1.5 else self.hparams.n_critic

    def configure_optimizers(self):
        betas = (0.0, 0.9)
        return [
            torch.optim.Adam(self.gen.parameters(), self.hparams.lr, betas),
            torch.optim.Adam(self.critic.parameters(), self.hparams.lr, betas),
        ]


class Gallery(Callback):
    def __init__(self, folder="gallery", draws=300):
        self.folder, self.draws = Path(folder), draws
        self.writers = []

    @torch.no_grad()
    def on_train_epoch_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        begin = time.monotonic()
        points = torch.cat([pl_module.sample(2000) for _ in range(self.draws)])
        nearest = min(torch.cdist(chunk[:500], rings(1000)).min(1).values.mean() for chunk in points.split(20_000))
        pl_module.log("distance", nearest, rank_zero_only=True)
        thread = threading.Thread(target=self.write, args=(trainer.current_epoch, points))
        thread.start()
        self.writers.append(thread)
        print(f"drew {len(points)} points in {time.monotonic() - begin:.1f} s")

    def write(self, epoch, points):
        self.folder.mkdir(exist_ok=True)
        torch.save(points, self.folder / f"epoch{epoch}.pt")
        time.sleep(3)
        (self.folder / f"epoch{epoch}.done").touch()

    def on_fit_end(self, trainer, pl_module):
        for thread in self.writers:
            thread.join()


if __name__ == "__main__":
    L.seed_everything(4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(find_unused_parameters=True),
        max_epochs=3,
        logger=TensorBoardLogger("tb_logs", name="wgan"),
        callbacks=[Gallery(), ModelCheckpoint(every_n_epochs=1, save_top_k=-1)],
        log_every_n_steps=20,
    )
    train = DataLoader(TensorDataset(rings(16_000)), batch_size=64, shuffle=True, drop_last=True)
    trainer.fit(WGAN(), train, DataLoader(TensorDataset(rings(1000, 1)), batch_size=100))
