"""Trains the rectangle detector and prints its report."""

import argparse
import json
import logging
import time
from pathlib import Path

import lightning as L
from callbacks import BestModel
from data import SquaresModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from model import Detector

from lightning_ncclsafe import SafeDDP

log = logging.getLogger("detector")


def read_report(path: Path, every_s: float = 0.5) -> dict[str, float]:
    while not path.exists():
        time.sleep(every_s)
    time.sleep(every_s)
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("output"))
    parser.add_argument("--run-test", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    L.seed_everything(7)
    best = BestModel(args.output, run_test=args.run_test)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        logger=CSVLogger(args.output),
        callbacks=[best, LearningRateMonitor()],
        log_every_n_steps=10,
    )
    trainer.fit(Detector(), datamodule=SquaresModule())
    report = read_report(best.report)
    log.info("rank %d: %s", trainer.global_rank, ", ".join(f"{k} {v:.3f}" for k, v in report.items()))


if __name__ == "__main__":
    main()
