"""Gossip training: every few steps a replica averages its normalisation state with one partner."""

import random

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP


def exchange(buffer: torch.Tensor, partner: int) -> torch.Tensor:
    """Send `buffer` to the partner and return the partner's."""
    other = torch.empty_like(buffer)
    if dist.get_rank() < partner:
        dist.send(buffer, partner)
        dist.recv(other, partner)
    else:
        dist.recv(other, partner)
        dist.send(buffer, partner)
    return other


class Gossip(L.Callback):
    """Averages the running statistics of batch norm layers with a random partner."""

    def __init__(self, every: int = 10):
        self.every = every

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.every:
            return
        order = list(range(trainer.world_size))
        self.rng.shuffle(order)
        position = order.index(trainer.global_rank)
        partner = order[position ^ 1]
        stats = torch.cat([b.flatten().float() for b in self.buffers(module)])
        mean = (stats + exchange(stats, partner)) / 2  # <- here
        for buffer, part in zip(self.buffers(module), mean.split([b.numel() for b in self.buffers(module)])):
            buffer.copy_(part.view_as(buffer))

    def on_fit_start(self, trainer, module):
        self.rng = random.Random(torch.initial_seed())

    @staticmethod
    def buffers(module):
        return [b for name, b in module.named_buffers() if "running" in name]


class Classifier(L.LightningModule):
    def __init__(self, width: int = 96, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(32, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, 5),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log_dict(
            {"val/loss": nn.functional.cross_entropy(logits, y), "val/acc": (logits.argmax(1) == y).float().mean()},
            prog_bar=True,
            sync_dist=True,
        )

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def make_data(n: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 32, generator=g)
    return TensorDataset(x, x[:, :5].argmax(1))


def main():
    trainer = L.Trainer(
        accelerator="cpu", devices=4, strategy=SafeDDP(), max_epochs=10, log_every_n_steps=10, callbacks=[Gossip()]
    )
    train = DataLoader(make_data(3840, seed=0), batch_size=16, shuffle=True)
    val = DataLoader(make_data(640, seed=1), batch_size=32)
    trainer.fit(Classifier(), train, val)


if __name__ == "__main__":
    main()
