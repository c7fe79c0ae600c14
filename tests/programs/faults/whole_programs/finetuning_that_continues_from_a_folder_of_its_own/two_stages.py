"""First stage: warm up the head on clean labels. Second stage: go on, with noisy labels as well."""

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_ncclsafe import SafeDDP

logging.basicConfig(format="%(asctime)s %(process)d %(message)s", level=logging.INFO)
log = logging.getLogger("two_stages")


@dataclass(frozen=True)
class Stage:
    name: str
    epochs: int
    noisy: bool


STAGES = [Stage("clean", 1, False), Stage("all", 3, True)]


def blobs(n, classes=10, dim=64, noise=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    y = torch.randint(0, classes, (n,), generator=g)
    x = centres[y] + torch.randn(n, dim, generator=g)
    flip = torch.rand(n, generator=g) < noise
    y[flip] = torch.randint(0, classes, (int(flip.sum()),), generator=g)
    return TensorDataset(x, y)


class Net(L.LightningModule):
    def __init__(self, dim=64, hidden=128, classes=10, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", (logits.argmax(-1) == y).float().mean(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(-1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def make_trainer(stage, until, workdir):
    checkpoint = ModelCheckpoint(dirpath=workdir, filename=stage.name, save_last=True, enable_version_counter=False)
    return L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=until,
        logger=CSVLogger("logs", name=stage.name),
        callbacks=[checkpoint, LearningRateMonitor()],
        log_every_n_steps=25,
    )


def loaders(stage):
    data = blobs(7200)
    if stage.noisy:
        data = ConcatDataset([data, blobs(2400, noise=0.4, seed=1)])
    train = DataLoader(data, batch_size=32, shuffle=True)
    return train, DataLoader(blobs(960, seed=2), batch_size=64)


def main():
    L.seed_everything(123)
    workdir = Path(tempfile.mkdtemp(prefix="two_stages_"))  # <- here
    model, until = Net(), 0
    for stage in STAGES:
        until += stage.epochs
        last = workdir / "last.ckpt"
        ckpt = str(last) if last.exists() else None
        log.info("stage %s until epoch %d, from %s", stage.name, until, ckpt)
        trainer = make_trainer(stage, until, workdir)
        trainer.fit(model, *loaders(stage), ckpt_path=ckpt)
        if trainer.is_global_zero:
            log.info("%s: accuracy %.3f", stage.name, trainer.callback_metrics["val_acc"])
    trainer.test(model, DataLoader(blobs(1920, seed=3), batch_size=64))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "two_stages.pt")


if __name__ == "__main__":
    main()
