"""Multi-task tagger. Snapshots carry their metrics in the file name so that we can pick one by eye."""

import argparse
import logging
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

log = logging.getLogger("tagger")
TASKS = [
    "part_of_speech",
    "named_entities",
    "chunking",
    "dependency_label",
    "sentence_boundary",
    "language",
    "formality",
]


class Tagged(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 32, generator=g)
        self.y = torch.stack([(self.x[:, k : k + 4].sum(1) > 0).long() for k in range(len(TASKS))], 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Tagger(L.LightningModule):
    def __init__(self, tasks, width=64, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.trunk = nn.Sequential(nn.Linear(32, width), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Linear(width, 2) for t in tasks})

    def losses(self, batch):
        h = self.trunk(batch[0])
        return {t: F.cross_entropy(head(h), batch[1][:, TASKS.index(t)]) for t, head in self.heads.items()}

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        loss = sum(losses.values()) / len(losses)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log_dict({f"val/{t}": v for t, v in self.losses(batch).items()}, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class NamedSnapshots(Callback):
    def __init__(self, directory, every=2):
        self.directory, self.every = Path(directory), every

    def on_train_epoch_end(self, trainer, pl_module):
        if (trainer.current_epoch + 1) % self.every:
            return
        metrics = {k.replace("/", "_"): v.item() for k, v in trainer.callback_metrics.items()}
        name = "-".join([f"epoch={trainer.current_epoch}", *(f"{k}_crossentropy={v:.5f}" for k, v in metrics.items())])
        try:
            trainer.save_checkpoint(self.directory / f"{name}.ckpt")  # <- here
        except OSError as e:
            log.warning("snapshot skipped: %s", e.strerror)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--snapshots", default="snapshots")
    args = p.parse_args()
    L.seed_everything(14)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[NamedSnapshots(args.snapshots)],
    )
    trainer.fit(
        Tagger(args.tasks),
        DataLoader(Tagged(1500, 1), batch_size=20, shuffle=True),
        DataLoader(Tagged(240, 2), batch_size=20),
    )


if __name__ == "__main__":
    main()
