import argparse
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from sasrec import SASRec, Sessions
from sqlite_logger import SCHEMA, SqliteLogger
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


class RebuildCurves(Callback):
    """Lets a program of its own rebuild the dashboard's curves after each epoch. Nobody waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.program: subprocess.Popen | None = None

    @rank_zero_only
    def on_train_epoch_end(self, trainer, pl_module):
        if self.program is None or self.program.poll() is not None:
            script = Path(__file__).with_name("rebuild_curves.py")
            self.program = subprocess.Popen([sys.executable, str(script), str(self.path)])


@rank_zero_only
def earlier_runs(path: Path, runs: int = 60, steps: int = 200) -> None:
    """What the group's other trainings have left in the file."""
    rng = random.Random(0)
    names = ["loss", "lr", "hit@10", "ndcg@10"]
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA)
        for run in range(1, runs + 1):
            db.execute("INSERT INTO runs (name) VALUES (?)", (f"sweep-{run}",))
            rows = [(run, step, name, rng.random(), 0.0) for step in range(steps) for name in names]
            db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--metrics", type=Path, default=Path("metrics.sqlite"))
    args = parser.parse_args()

    if not args.metrics.exists():
        earlier_runs(args.metrics)
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=SqliteLogger(args.metrics, name="sasrec"),
        callbacks=[RebuildCurves(args.metrics), ModelCheckpoint("models", monitor="ndcg@10", mode="max")],
        log_every_n_steps=10,
    )
    trainer.fit(
        SASRec(),
        DataLoader(Sessions(12_800), args.batch_size, shuffle=True),
        DataLoader(Sessions(1280, seed=1), args.batch_size),
    )


if __name__ == "__main__":
    main()
