"""Ranker on clickstream sessions; validation scores go to a SQLite file for the dashboards."""

import argparse
import sqlite3
import time

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

ITEMS = 400


class Sessions(Dataset):
    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.history = torch.randint(0, ITEMS, (count, 10), generator=generator)
        shift = torch.randint(1, 4, (count,), generator=generator)
        self.clicked = (self.history[:, -1] + shift) % ITEMS

    def __len__(self):
        return len(self.history)

    def __getitem__(self, index):
        return index, self.history[index], self.clicked[index]


class ScoreStore:
    """Scores of every rank in one database, one row per session and epoch."""

    def __init__(self, path: str = "scores.db"):
        self.connection = sqlite3.connect(path, timeout=1800)
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS scores (epoch INTEGER, session INTEGER, rank INTEGER, score REAL)"
        )
        self.connection.execute("CREATE TABLE IF NOT EXISTS runs (epoch INTEGER, started REAL, finished REAL)")
        self.connection.commit()

    def open_run(self, epoch: int):
        self.connection.execute("INSERT INTO runs VALUES (?, ?, NULL)", (epoch, time.time()))  # <- here

    def close_run(self, epoch: int):
        self.connection.execute("UPDATE runs SET finished = ? WHERE epoch = ?", (time.time(), epoch))
        self.connection.commit()

    def add(self, epoch: int, rank: int, sessions, scores):
        rows = [(epoch, s, rank, float(p)) for s, p in zip(sessions.tolist(), scores.tolist())]
        self.connection.executemany("INSERT INTO scores VALUES (?, ?, ?, ?)", rows)

    def flush(self):
        self.connection.commit()

    def mean(self, epoch: int) -> float:
        query = "SELECT AVG(score) FROM scores WHERE epoch = ?"
        return self.connection.execute(query, (epoch,)).fetchone()[0] or 0.0


class ScoreWriter(Callback):
    def __init__(self, every_n_epochs: int = 2):
        self.every_n_epochs = every_n_epochs
        self.store = None
        self.rows = []

    def setup(self, trainer, pl_module, stage):
        if self.store is None:
            self.store = ScoreStore()

    def active(self, trainer):
        return not trainer.sanity_checking and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_validation_epoch_start(self, trainer, pl_module):
        if self.active(trainer) and trainer.is_global_zero:
            self.store.open_run(trainer.current_epoch)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if self.active(trainer):
            self.rows.append((batch[0], outputs))

    def on_validation_epoch_end(self, trainer, pl_module):
        if not self.active(trainer):
            return
        trainer.strategy.barrier("scores")
        if not trainer.is_global_zero:
            for sessions, scores in self.rows:
                self.store.add(trainer.current_epoch, trainer.global_rank, sessions, scores)
            self.store.flush()
        self.rows.clear()
        trainer.strategy.barrier("scores written")
        if trainer.is_global_zero:
            self.store.close_run(trainer.current_epoch)
            print(f"epoch {trainer.current_epoch}: mean score {self.store.mean(trainer.current_epoch):.4f}")


class Ranker(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(ITEMS, width)
        self.mix = nn.Sequential(nn.Linear(10 * width, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, history):
        return self.mix(self.embed(history).flatten(1)) @ self.embed.weight.T

    def training_step(self, batch, batch_idx):
        _, history, clicked = batch
        loss = F.cross_entropy(self(history), clicked)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        _, history, clicked = batch
        logits = self(history)
        self.log("val/loss", F.cross_entropy(logits, clicked), sync_dist=True, prog_bar=True)
        return logits.softmax(dim=1).gather(1, clicked[:, None]).flatten()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(8)
    train = DataLoader(Sessions(1920, seed=0), args.batch_size, shuffle=True)
    val = DataLoader(Sessions(384, seed=1), args.batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[ScoreWriter()],
        log_every_n_steps=10,
    )
    trainer.fit(Ranker(), train, val)
