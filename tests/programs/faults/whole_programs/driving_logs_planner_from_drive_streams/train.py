import argparse
import os
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from drive.joined import JoinedLoader
from drive.recorder import record
from drive.stream import DriveStream
from lightning_ncclsafe import SafeDDP


class Planner(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(160, 96), nn.ReLU(), nn.Linear(96, 2))
        self.register_buffer("ema", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = (self.net(x) - y).pow(2).mean()
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.ema.lerp_(loss.detach(), 0.05)
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Cooldown(Callback):
    """The rig's power budget asks for a pause between epochs."""

    def on_train_epoch_end(self, trainer, pl_module):
        time.sleep(4 + 2 * trainer.global_rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    rank, world = int(os.environ.get("LOCAL_RANK", 0)), 3
    L.seed_everything(29)
    if rank == 0 and not os.path.exists("drives/ON_TAPE"):
        record("drives")
    stream = DriveStream("drives", rank, world)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[Cooldown()],
        log_every_n_steps=10,
    )
    trainer.fit(Planner(), JoinedLoader(DataLoader(stream, batch_size=16)))
